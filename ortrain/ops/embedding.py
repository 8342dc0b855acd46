"""``ortrain::Embedding``: rows of a table, of which one may be excluded from training."""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.graph.indices import from_the_start
from ortrain.ops.base import operator


def _types(node: ir.Node) -> None:
    weight, indices = node.inputs[0], node.inputs[1]
    assert weight is not None
    table, positions = shapes.dims(weight), shapes.dims(indices)
    shape = None
    if table is not None and positions is not None:
        shape = ir.Shape((*positions, *table[1:]))
    shapes.assign(node.outputs[0], weight.dtype, shape)


@operator("Embedding", types=_types)
def embedding(
    op: Builder, weight: ir.Value, indices: ir.Value, *, padding_idx: int = -1
) -> ir.Value:
    """Rows of ``weight`` [V, H] at the integer ``indices`` [...]; the result is [..., H].

    ``padding_idx`` changes no value: it names the row that receives no gradient (-1: none), as in
    ``torch.nn.functional.embedding``, which refuses negative indices as well.
    """
    result: ir.Value = op.Gather(weight, from_the_start(op, indices), axis=0)
    return result

"""``ortrain::CustomGradient``: results whose gradients the user's program has written out itself.

The forward holds these gradients as ordinary operators, of ``ortrain::Upstream`` in the place of
what will arrive. In the backward they are computed of what does; the forward has no use of them::

    y = square(x)                        # cut from the gradients of its operators
    dy = ortrain::Upstream(y, number=1)
    dx = dy * x * 3                      # what the user calls the gradient
    z = ortrain::CustomGradient(y, x, dx, number=1)     # y
"""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.ops.base import DOMAIN, like_first, operator


def is_custom_gradient(node: ir.Node) -> bool:
    """Whether a node holds gradients that the user's program has written out."""
    return node.domain == DOMAIN and node.op_type == "CustomGradient"


def _like_results(node: ir.Node) -> None:
    for source, target in zip(node.inputs, node.outputs, strict=False):
        assert source is not None
        shapes.assign(target, source.dtype, source.shape)


@operator("CustomGradient", types=_like_results)
def custom_gradient(
    op: Builder, *values: ir.Value, number: int, results: int, inputs: int
) -> tuple[ir.Value, ...]:
    """Returns the results.

    Args:
        op: the builder.
        values: results, then inputs, then a gradient for each input, the last ones absent where
            there is none.
        number: of the call.
        results: how many there are.
        inputs: how many there are.
    """
    return tuple([op.Identity(value) for value in values[:results]])


@operator("Upstream", types=like_first)
def upstream(op: Builder, result: ir.Value, *, number: int, index: int) -> ir.Value:
    """Stands for the gradient of a result, and is zero until there is one.

    Args:
        op: the builder.
        result: that it is the gradient of.
        number: of the call.
        index: of the result.
    """
    return op.zeros_like(result)

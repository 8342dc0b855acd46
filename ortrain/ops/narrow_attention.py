"""``ortrain::NarrowAttention``: attention of float16 or bfloat16, in float32 between its products.

PyTorch's kernels have the scores and their softmax in float32 inside. Of numbers near 30 bfloat16
has every eighth, so that rounded scores make weights wrong by 6 %. And where the weights of a row
are alike, as they are at first, bfloat16 rounds all of them to the same side: of attention over
normal numbers the output is off by 1.7e-3, and with rounded weights and scores by 3.9e-3.

The gradient's weights and their own gradient are narrow: what they lose averages out.
"""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.ops.attention import attend, attention_type
from ortrain.ops.base import operator


def _types(node: ir.Node) -> None:
    attention_type(node)
    query, key = node.inputs[:2]
    assert query is not None
    k, y = shapes.dims(key), shapes.dims(node.outputs[0])
    if len(node.outputs) > 1:
        shape = None if k is None or y is None else ir.Shape((*y[:-1], k[-2]))
        shapes.assign(node.outputs[1], query.dtype, shape)


@operator("NarrowAttention", outputs=("output", "weights"), types=_types)
def narrow_attention(
    op: Builder,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    mask: ir.Value | None = None,
    seed: ir.Value | None = None,
    index: ir.Value | None = None,
    *,
    scale: float,
    causal: int = 0,
    ratio: float = 0.0,
    stream: int = 0,
) -> tuple[ir.Value, ir.Value]:
    """``softmax(scale * query keyᵀ + mask) value``, as Attention.

    Args:
        op: the builder.
        query: [..., L, E], float16 or bfloat16.
        key: [..., S, E], likewise.
        value: [..., S, F], likewise.
        mask: as in Attention, like the rest.
        seed: likewise.
        index: likewise.
        scale: likewise.
        causal: likewise.
        ratio: likewise.
        stream: likewise.

    Returns:
        The output [..., L, F], and the weights before dropout [..., L, S], for the gradient.
    """
    return attend(
        op, query, key, value, mask, seed, index,
        scale=scale, causal=causal, ratio=ratio, stream=stream,
    )  # fmt: skip

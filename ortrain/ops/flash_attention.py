"""``ortrain::FlashAttention``: attention of which the backward keeps a number a query.

Dao et al., "FlashAttention" (2022): the weights follow again from the scores and from the logarithm
of the sum of their exponentials.
"""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.ops.attention import inside, scores, weighted
from ortrain.ops.base import operator


def _types(node: ir.Node) -> None:
    query, _, value = node.inputs[:3]
    assert query is not None
    q, v = shapes.dims(query), shapes.dims(value)
    output = None if q is None or v is None else ir.Shape((*q[:-1], v[-1]))
    shapes.assign(node.outputs[0], query.dtype, output)
    if len(node.outputs) > 1:
        shapes.assign(node.outputs[1], inside(query), None if q is None else ir.Shape(q[:-1]))


@operator("FlashAttention", outputs=("output", "logsumexp"), types=_types)
def flash_attention(
    op: Builder,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    mask: ir.Value | None = None,
    *,
    scale: float,
    causal: int = 0,
) -> tuple[ir.Value, ir.Value]:
    """``softmax(scale * query keyᵀ + mask) value``, as Attention without dropout.

    Args:
        op: the builder.
        query: [B, H, L, E].
        key: [B, H, S, E].
        value: [B, H, S, F].
        mask: bool or floating, broadcastable to [B, H, L, S], as in Attention.
        scale: factor of the products.
        causal: as in Attention.

    Returns:
        The output [B, H, L, F], and of the scores of each query the logarithm of the sum of the
        exponentials [B, H, L], in float32 of narrow tensors.
    """
    found, alive = scores(op, query, key, mask, scale=scale, causal=causal)
    output = weighted(op, op.Softmax(found, axis=-1), value, alive)
    return output, op.ReduceLogSumExp(found, [-1], keepdims=0)

"""The gradient of attention, with the weights computed again."""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph.build import Builder
from ortrain.ops.attention import scaled, scores
from ortrain.ops.base import like_inputs, operator


@operator(
    "FlashAttentionGradient",
    outputs=("d_query", "d_key", "d_value"),
    types=like_inputs(1, 2, 3),
)
def flash_attention_gradient(
    op: Builder,
    dy: ir.Value,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    output: ir.Value,
    logsumexp: ir.Value,
    mask: ir.Value | None = None,
    *,
    scale: float,
    causal: int = 0,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """with p = exp(s - logsumexp), ds = scale * p * (dy vᵀ - sum(dy * y)): ds k, dsᵀ q and pᵀ dy

    Args:
        op: the builder.
        dy: [B, H, L, F].
        query: as of FlashAttention, like the rest.
        key: likewise.
        value: likewise.
        output: likewise.
        logsumexp: likewise.
        mask: likewise.
        scale: likewise.
        causal: likewise.
    """
    assert query.dtype is not None
    assert logsumexp.dtype is not None
    found, alive = scores(op, query, key, mask, scale=scale, causal=causal)
    exponent = op.cast(found, logsumexp.dtype) - op.Unsqueeze(logsumexp, [-1])
    weights = op.cast(op.Exp(exponent), query.dtype)
    if alive is not None:
        weights = weights * alive
    turned = [0, 1, 3, 2]
    row = op.ReduceSum(dy * output, [-1], keepdims=1)
    steep = weights * (op.MatMul(dy, op.Transpose(value, perm=turned)) - row)
    d_scores = scaled(op, steep, scale)
    d_query = op.MatMul(d_scores, key)
    d_key = op.MatMul(op.Transpose(d_scores, perm=turned), query)
    d_value = op.MatMul(op.Transpose(weights, perm=turned), dy)
    return d_query, d_key, d_value

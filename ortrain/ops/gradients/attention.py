"""Gradients of attention: with the weights computed again, and with them kept."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ortrain.graph.broadcast import unbroadcast
from ortrain.graph.build import Builder
from ortrain.ops.attention import dropped, inside, masked, scores, wide_product
from ortrain.ops.base import DOMAIN, like_inputs, operator


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
    found, alive = scores(op, query, key, mask, scale=scale, causal=causal)
    weights = op.Exp(found - op.cast(op.Unsqueeze(logsumexp, [-1]), inside(query)))
    if alive is not None:
        weights = weights * alive
    d_weights = wide_product(op, dy, op.transposed(value, query))
    row = op.ReduceSum(op.cast(dy, inside(dy)) * op.cast(output, inside(dy)), [-1], keepdims=1)
    steep = weights * (d_weights - row)
    d_scores = op.cast(op.Mul(steep, scale), query.dtype)
    d_query = op.MatMul(d_scores, key)
    d_key = op.MatMul(op.transposed(d_scores, query), query)
    d_value = op.MatMul(op.transposed(op.cast(weights, query.dtype), query), dy)
    return d_query, d_key, d_value


@operator(
    "NarrowAttentionGradient",
    outputs=("d_query", "d_key", "d_value", "d_mask"),
    types=like_inputs(1, 2, 3, 5),
)
def narrow_attention_gradient(
    op: Builder,
    dy: ir.Value,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    weights: ir.Value,
    mask: ir.Value | None = None,
    seed: ir.Value | None = None,
    index: ir.Value | None = None,
    *,
    scale: float,
    ratio: float = 0.0,
    stream: int = 0,
    needs: Sequence[int] = (1, 1, 1, 1),
) -> tuple[ir.Value | None, ...]:
    """with d = dy vᵀ dropped, ds = w * (d - sum(w * d)): scale ds k, scale dsᵀ q, wᵀ dy, ds

    Args:
        op: the builder.
        dy: [..., L, F].
        query: as of NarrowAttention, like the rest.
        key: likewise.
        value: likewise.
        weights: likewise.
        mask: likewise.
        seed: likewise.
        index: likewise.
        scale: likewise.
        ratio: likewise.
        stream: likewise.
        needs: a flag for each output.
    """
    assert query.dtype is not None
    if mask is not None:
        _, alive = masked(op, mask, query)
        dy = dy * op.cast(alive, query.dtype)
    d_query = d_key = d_value = d_mask = None
    if needs[2]:
        used = dropped(op, weights, seed, index, ratio=ratio, stream=stream)
        d_value = op.MatMul(op.transposed(used, query), dy)
        d_value = unbroadcast(op, d_value, value, d_value)
    if needs[0] or needs[1] or needs[3]:
        flipped = op.transposed(value, query)
        # What the weights of a mask are trained by is a sum of few of these numbers.
        d_used = wide_product(op, dy, flipped) if needs[3] else op.MatMul(dy, flipped)
        d_weights = dropped(op, d_used, seed, index, ratio=ratio, stream=stream)
        kept = op.cast(weights, inside(query)) if needs[3] else weights
        steep = op.node("SoftmaxGradient", (d_weights, kept), domain=DOMAIN, axis=-1)
        if needs[3]:
            assert mask is not None
            assert mask.dtype is not None
            d_mask = op.cast(unbroadcast(op, steep, mask, steep), mask.dtype)
            steep = op.cast(steep, query.dtype)
        if needs[0]:
            d_query = _scaled_product(op, steep, key, scale)
            d_query = unbroadcast(op, d_query, query, d_query)
        if needs[1]:
            d_key = _scaled_product(op, op.transposed(steep, query), query, scale)
            d_key = unbroadcast(op, d_key, key, d_key)
    return d_query, d_key, d_value, d_mask


def _scaled_product(op: Builder, left: ir.Value, right: ir.Value, scale: float) -> ir.Value:
    """A product times a number, rounded once."""
    assert left.dtype is not None
    return op.cast(op.Mul(wide_product(op, left, right), scale), left.dtype)

"""Attention of running functions."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    causal: bool,
) -> Tensor:
    """``softmax(scale * query keyᵀ + mask) value``; zeros for a query that sees no key.

    Args:
        query: [..., L, E].
        key: [..., S, E].
        value: [..., S, F].
        mask: bool (true: take part) or floating (added), broadcastable to [..., L, S], or None.
        scale: factor of the products.
        causal: whether query i sees keys 0 … i only; then there is no mask.

    Returns:
        [..., L, F].
    """
    if mask is None:
        return scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale)
    while mask.dim() < 2:
        mask = mask.unsqueeze(0)
    boolean = mask.dtype is torch.bool
    if not boolean:
        mask = mask.to(query.dtype)
    if not query.is_cuda:
        return scaled_dot_product_attention(query, key, value, mask, scale=scale)
    # cuDNN gives a query that a bool mask shuts out the mean of the values, in float16 and
    # bfloat16 on an H100. So it sees every key, and what it got is cleared.
    shut_out = (mask.logical_not() if boolean else mask == -math.inf).all(-1, keepdim=True)
    mask = mask | shut_out if boolean else mask.masked_fill(shut_out, 0.0)
    result = scaled_dot_product_attention(query, key, value, mask, scale=scale)
    return result.masked_fill_(shut_out, 0.0)

"""Attention of running functions that keeps for its gradient a number a query, not the weights.

PyTorch has it in three kernels: one for the CPU, and for GPUs one that takes float16 and bfloat16
without a mask, and one that takes any of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

aten = torch.ops.aten
# Rows of a mask begin at multiples of so many elements.
_ALIGNED = 16
# Up to so many keys, the kernel that takes any mask is as fast as the one that takes none.
_SHORT = 512


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """``softmax(scale * query keyᵀ + mask) value``, and the logarithms of the sums in it.

    Args:
        query: [B, H, L, E].
        key: [B, H, S, E].
        value: [B, H, S, E].
        mask: bool (true: take part) or floating (added), broadcastable to [B, H, L, S], or None.
        scale: factor of the products.
        causal: whether query i sees keys 0 … i only.

    Returns:
        The result [B, H, L, E], with zeros for a query that sees no key, and the logarithms in a
        form that :func:`gradient` takes.
    """
    query, key, value = map(_in_rows, (query, key, value))
    if not query.is_cuda:
        bias = _bias(mask, query)
        output, sums = aten._scaled_dot_product_flash_attention_for_cpu.default(
            query, key, value, 0.0, causal, attn_mask=bias, scale=scale
        )
        return output, sums
    if _is_for_flash(query, key, mask, causal):
        output, sums, *_ = aten._scaled_dot_product_flash_attention.default(
            query, key, value, 0.0, causal, False, scale=scale
        )
        return output, sums
    bias, shut_out = _aligned_bias(mask, query, key)
    output, sums, *_ = aten._scaled_dot_product_efficient_attention.default(
        query, key, value, bias, True, 0.0, causal, scale=scale
    )
    return output if shut_out is None else output.masked_fill_(shut_out, 0.0), sums


def gradient(
    dy: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value; the arguments are those of :func:`attend`."""
    dy, query, key, value, output = map(_in_rows, (dy, query, key, value, output))
    if not query.is_cuda:
        bias = _bias(mask, query)
        d_query, d_key, d_value = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            dy, query, key, value, output, sums, 0.0, causal, attn_mask=bias, scale=scale
        )
        return d_query, d_key, d_value
    # Nothing is drawn: the states of the generator that the kernels take are not read.
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    if _is_for_flash(query, key, mask, causal):
        d_query, d_key, d_value = aten._scaled_dot_product_flash_attention_backward.default(
            dy, query, key, value, output, sums, None, None, query.size(-2), key.size(-2), 0.0,
            causal, state, state, scale=scale,
        )  # fmt: skip
        return d_query, d_key, d_value
    bias, shut_out = _aligned_bias(mask, query, key)
    if shut_out is not None:
        dy = dy.masked_fill(shut_out, 0.0)
    d_query, d_key, d_value, _ = aten._scaled_dot_product_efficient_attention_backward.default(
        dy, query, key, value, bias, output, sums, state[0], state[1], 0.0,
        [True, True, True, False], causal, scale=scale,
    )  # fmt: skip
    return d_query, d_key, d_value


def _in_rows(tensor: Tensor) -> Tensor:
    """The tensor in rows of neighbours: the kernels take nothing else, and do not look."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _is_for_flash(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> bool:
    """Whether the first of the kernels for GPUs takes it, and pays.

    Forward and backward of (2, 12, 512, 64) in bfloat16 take 108 us in it and 100 in the other one
    on an H100, of (8, 12, 1024, 64) 382 against 856. Causal, it aligns the last query with the last
    key.
    """
    return (
        mask is None
        and query.dtype in (torch.float16, torch.bfloat16)
        and key.size(-2) > _SHORT
        and query.size(-1) <= 256
        and (not causal or query.size(-2) == key.size(-2))
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """What is added to the scores; PyTorch takes two axes or four."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        zeros = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
        mask = zeros.masked_fill_(mask.logical_not(), -math.inf)
    mask = mask.to(query.dtype)
    missing = 4 - mask.dim()
    return _in_rows(mask[(None,) * missing] if missing else mask)


def _aligned_bias(
    mask: Tensor | None, query: Tensor, key: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The same of the scores' whole shape, in aligned rows; and which queries see no key.

    Those see every key instead, since their row would be no number, and are cleared.
    """
    bias = _bias(mask, query)
    if bias is None:
        return None, None
    shut_out = (bias == -math.inf).all(-1, keepdim=True)
    bias = bias.masked_fill(shut_out, 0.0)
    count = key.size(-2)
    bias = bias.expand(*bias.shape[:-1], count)
    if missing := -count % _ALIGNED:
        bias = torch.constant_pad_nd(bias, [0, missing])[..., :count]
    return bias.expand(*query.shape[:-1], count), shut_out

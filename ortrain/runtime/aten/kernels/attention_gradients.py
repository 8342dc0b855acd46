"""Attention that keeps a number a query for its gradient, and that gradient."""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.runtime.aten.kernels.gradients import HALF
from ortrain.runtime.aten.table import kernel


def _is_dense(query, key, value, mask):
    """Whether PyTorch's kernels take the operands: four axes, nothing broadcast but the mask."""
    q, k, v = (shapes.dims(x) for x in (query, key, value))
    if any(d is None or len(d) != 4 or None in d for d in (q, k, v)):
        return False
    if k != v or q[:2] != k[:2] or q[-1] != k[-1]:
        return False
    if not isinstance(q[-1], int) or q[-1] % 8:  # as the kernels for GPUs have it
        return False
    if mask is None:
        return True
    known = shapes.dims(mask)
    if known is None or len(known) > 4 or mask.dtype not in (ir.DataType.BOOL, *shapes.FLOATING):
        return False
    whole = (*q[:3], k[2])
    return all(d in (1, w) for d, w in zip(known[::-1], whole[::-1], strict=False))


def _attends_densely(node):
    return _is_dense(*[*node.inputs, None][:4])


def _attended_densely(node):
    return _is_dense(*node.inputs[1:4], [*node.inputs, None][6])


def is_slow(node):
    """On the CPU the gradient of narrow tensors takes longer than the products that it saves.

    Of (8, 12, 128, 64) in bfloat16 161 ms on one core, against 28 with the weights kept; the
    forward saves 4 ms. In float32 it is 68 against 94, and the forward saves 50.
    """
    return node.op_type == "FlashAttention" and node.inputs[0].dtype in HALF


@kernel("ortrain::FlashAttention", when=_attends_densely)
def attention(t, query, key, value, mask=None, *, scale, causal=0):
    return t.call(
        "flash.attend", query, key, value, mask, scale=scale, causal=bool(causal), outputs=2
    )


@kernel("ortrain::FlashAttentionGradient", when=_attended_densely)
def attention_gradient(
    t, dy, query, key, value, output, logsumexp, mask=None, *, scale, causal=0
):  # fmt: skip
    return t.call(
        "flash.gradient", dy, query, key, value, output, logsumexp, mask, scale=scale,
        causal=bool(causal), outputs=3,
    )  # fmt: skip

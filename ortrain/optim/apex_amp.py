"""Optimizers that Apex AMP has initialized: gradients are unscaled by torch's foreach kernels.

Written for the Apex of 2020 and later. Tried with stand-ins that have the attributes that Apex's
code uses, not with Apex itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ortrain.optim.method import replace_methods


def replace(optimizer: object) -> list[str] | None:
    """Replaces ``_post_amp_backward`` and ``zero_grad``.

    Apex's FusedSGD keeps the first, because it unscales in its own kernel.

    Args:
        optimizer: any object.

    Returns:
        What to tell the user; None for an object that Apex AMP has not initialized.
    """
    if not hasattr(optimizer, "_amp_stash"):
        return None
    methods: dict[str, Callable[..., Any]] = {
        "zero_grad": zero_grad,
        "_post_amp_backward": post_amp_backward,
    }
    if any(kind.__name__ == "FusedSGD" for kind in type(optimizer).__mro__):
        del methods["_post_amp_backward"]
    return replace_methods(optimizer, methods, library="Apex AMP")


@torch.no_grad()
def post_amp_backward(self: Any, scaler: Any) -> None:
    """Moves gradients from the model to the master parameters and divides them by the scale.

    Gradients of earlier backwards, which are unscaled already, are added. The scaler is told of
    every NaN and infinity.

    Args:
        self: the optimizer.
        scaler: Apex's ``LossScaler``.
    """
    stash = self._amp_stash
    self._amp_lazy_init()
    if hasattr(stash, "all_fp32_from_fp16_params"):
        _into_masters(scaler, stash.all_fp16_params, stash.all_fp32_from_fp16_params)
        _in_place(scaler, stash.all_fp32_from_fp32_params, stash.all_fp32_from_fp32_grad_stash)
    else:  # opt_level O1 and O3 have no master parameters
        _in_place(scaler, stash.all_fp16_params, stash.all_fp16_grad_stash)
        _in_place(scaler, stash.all_fp32_params, stash.all_fp32_grad_stash)


def zero_grad(self: Any, set_to_none: bool = True) -> None:
    """Frees the gradients of the model, or fills them with zeros; frees those of the masters.

    Args:
        self: the optimizer.
        set_to_none: whether to free them; Apex's own cannot.
    """
    stash = self._amp_stash
    self._amp_lazy_init()
    names = ("all_fp16_params", "all_fp32_from_fp32_params", "all_fp32_params")
    params = [param for name in names for param in getattr(stash, name, ())]
    if set_to_none:
        for param in params:
            param.grad = None
    else:
        grads = [param.grad.detach_() for param in params if param.grad is not None]
        if grads:
            torch._foreach_zero_(grads)
    for master in getattr(stash, "all_fp32_from_fp16_params", ()):
        master.grad = None


def _into_masters(scaler: Any, params: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """The gradients of ``params`` over the scale, added to those of their masters."""
    pairs = [(p, m) for p, m in zip(params, masters, strict=True) if p.grad is not None]
    if not pairs:
        return
    incoming = [torch.empty_like(master) for _, master in pairs]
    torch._foreach_copy_(incoming, [p.grad for p, _ in pairs if p.grad is not None])
    _unscale(scaler, incoming)
    earlier, later = [], []
    for (_, master), grad in zip(pairs, incoming, strict=True):
        if master.grad is None:
            master.grad = grad
        else:
            earlier.append(master.grad)
            later.append(grad)
    if earlier:
        torch._foreach_add_(earlier, later)


def _in_place(scaler: Any, params: Sequence[Tensor], stashed: list[Tensor | None]) -> None:
    """The gradients of ``params`` over the scale, plus those put aside before the backward."""
    incoming = [param.grad for param in params if param.grad is not None]
    # Apex's own exception: a constant scale of 1 needs neither a division nor a check.
    if incoming and (scaler.dynamic or scaler.loss_scale() != 1.0):
        _unscale(scaler, incoming)
    grads, earlier = [], []
    for param, aside in zip(params, stashed, strict=True):
        if param.grad is None:
            param.grad = aside
        elif aside is not None:
            grads.append(param.grad)
            earlier.append(aside)
    if grads:
        torch._foreach_add_(grads, earlier)
    stashed[:] = [None] * len(stashed)


def _unscale(scaler: Any, grads: list[Tensor]) -> None:
    """Divides by the scale and checks in one pass; nothing waits for the device."""
    device = grads[0].device
    found = torch.zeros((), device=device)
    inverse = torch.full((), 1.0 / scaler.loss_scale(), device=device)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse)
    if scaler.has_fused_kernel:
        # Apex looks at this buffer once, when it updates the scale.
        scaler._overflow_buf.logical_or_(found.bool())
    else:
        scaler._has_overflow = scaler._has_overflow or bool(found.item())


__all__ = ["replace"]

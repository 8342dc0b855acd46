"""The three kinds of Adam, in the terms of the two that torch has a kernel for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from torch import Tensor


class AdamWMode(IntEnum):
    """Where weight decay and epsilon enter; `FusedAdam` has the formulas."""

    ADAM_L2_REGULARIZATION = 0
    ADAMW_TRANSFORMERS = 1
    ADAMW_TORCH = 2


@dataclass(frozen=True)
class KernelTerms:
    """What the kernel is called with.

    Attributes:
        lr: learning rate.
        weight_decay: rate.
        decoupled: AdamW's kernel rather than Adam's.
        bias_correction: the kernel does its own.
        shrink: what parameters are to be multiplied by afterwards, in a pass of their own.
    """

    lr: float | Tensor
    weight_decay: float
    decoupled: bool
    bias_correction: bool
    shrink: float | Tensor | None = None


def kernel_terms(mode: AdamWMode, group: Mapping[str, Any], step: int) -> KernelTerms:
    """The terms in which the kernel computes a mode, exact but for rounding.

    The kernel adds eps after it has corrected v. The first two modes add it before: for them its
    own corrections are switched off, and sqrt(c2) / c1 goes into the learning rate. What the second
    mode decays afterwards, the kernel can decay before, because ::

        (1 - lr decay) (p - u) = (1 - lr decay) p - (1 - lr decay) u

    which saves a pass over the parameters: 8 of 36 bytes an element.

    Args:
        mode: one of the three.
        group: hyperparameters.
        step: from 1 on; used by the first two modes.
    """
    lr, decay = group["lr"], group["weight_decay"]
    if isinstance(lr, Tensor) and lr.is_cpu:
        lr = lr.item()
    decoupled = mode != AdamWMode.ADAM_L2_REGULARIZATION
    if mode == AdamWMode.ADAMW_TORCH:
        return KernelTerms(lr, decay, decoupled, group["bias_correction"])
    rate = lr
    if group["bias_correction"]:
        first, second = (1 - float(beta) ** step for beta in group["betas"])
        rate = lr * math.sqrt(second) / first
    if not decoupled or not decay:
        return KernelTerms(rate, decay, decoupled, bias_correction=False)
    keep = 1 - lr * decay
    if isinstance(lr, Tensor) or keep * rate == 0:
        # The kernel takes its decay as a number, and multiplies it by its rate.
        return KernelTerms(rate, 0.0, decoupled, bias_correction=False, shrink=keep)
    return KernelTerms(keep * rate, lr * decay / (keep * rate), decoupled, bias_correction=False)


__all__ = ["AdamWMode", "KernelTerms", "kernel_terms"]

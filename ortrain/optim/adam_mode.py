"""The three kinds of Adam, in the terms of the two that torch has a kernel for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
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
        betas: decay of the two moments.
        eps: added to the denominator.
        weight_decay: rate.
        decoupled: AdamW's kernel rather than Adam's.
        bias_correction: the kernel does its own.
        taken_off: share of the parameters that is to be taken off them afterwards.
    """

    lr: float | Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    bias_correction: bool
    taken_off: float | Tensor | None = None


def kernel_terms(
    mode: AdamWMode, group: Mapping[str, Any], step: int, *, rounds_betas: bool = False
) -> KernelTerms:
    """The terms in which the kernel computes a mode, exact but for rounding.

    The kernel adds eps after it has corrected v. The first two modes add it before: for them its
    own corrections are switched off, and sqrt(c2) / c1 goes into the learning rate. What the second
    mode decays afterwards, the kernel can decay before, because ::

        (1 - lr decay) (p - u) = (1 - lr decay) p - (1 - lr decay) u

    which saves a pass over the parameters: 8 of 36 bytes an element.

    A kernel that has 0.999 in float32 has 1 - beta2 wrong by 1.3e-5, and so is its v. With c1 and
    c2 of what it has, a step is as long as it should be; with those of the exact betas, it was
    6.7e-6 too long on an H100, and with a beta2 of 0.9999 8.2e-5 too short. The kernel's own
    corrections, 1 - beta ** step in float32, make 1.5e-6 and 1.2e-5 of that.

    Args:
        mode: one of the three.
        group: hyperparameters.
        step: from 1 on; used by the first two modes.
        rounds_betas: the kernel has the betas in float32.
    """
    lr, decay, eps = group["lr"], group["weight_decay"], group["eps"]
    betas = (float(group["betas"][0]), float(group["betas"][1]))
    if isinstance(lr, Tensor) and lr.is_cpu:
        lr = lr.item()
    decoupled = mode != AdamWMode.ADAM_L2_REGULARIZATION
    if mode == AdamWMode.ADAMW_TORCH:
        return KernelTerms(lr, betas, eps, decay, decoupled, group["bias_correction"])
    rate = lr
    if group["bias_correction"]:
        exact = 1 - betas[1] ** step
        betas = (_in_float32(betas[0]), _in_float32(betas[1])) if rounds_betas else betas
        first, second = (1 - beta**step for beta in betas)
        rate = lr * math.sqrt(second) / first
        eps *= math.sqrt(second / exact)  # beside a root that is off by this
    if not decoupled or not decay:
        return KernelTerms(rate, betas, eps, decay, decoupled, bias_correction=False)
    keep = 1 - lr * decay
    if isinstance(lr, Tensor) or keep * rate == 0:
        # The kernel takes its decay as a number, and multiplies it by its rate.
        return KernelTerms(rate, betas, eps, 0.0, decoupled, False, taken_off=lr * decay)
    folded = lr * decay / (keep * rate)
    return KernelTerms(keep * rate, betas, eps, folded, decoupled, bias_correction=False)


def _in_float32(beta: float) -> float:
    """The nearest float32, unless that is 1."""
    rounded = torch.tensor(beta, dtype=torch.float32, device="cpu").item()
    return rounded if rounded < 1.0 else beta


__all__ = ["AdamWMode", "KernelTerms", "kernel_terms"]

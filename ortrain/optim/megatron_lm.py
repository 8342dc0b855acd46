"""``FP16_Optimizer`` of Megatron-LM 1.1.5: overflow and norm of all gradients at once.

The originals wait for the device after every gradient. Tried with stand-ins that have the
attributes that Megatron-LM's code uses, not with Megatron-LM itself.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ortrain.optim.clip import any_nonfinite, total_norm
from ortrain.optim.method import is_instance_of, replace_methods

NAME = "megatron.fp16.fp16.FP16_Optimizer"


def replace(
    optimizer: object,
    rank: Callable[[], int] | None = None,
    group: Callable[[], Any] | None = None,
) -> list[str] | None:
    """Replaces the methods of Megatron-LM's optimizer.

    Args:
        optimizer: any object.
        rank: this process's rank among those that share the model; by default, what Megatron-LM's
            ``mpu`` says.
        group: the process group of those; likewise.

    Returns:
        What to tell the user; None for an object of another kind.
    """
    if not is_instance_of(optimizer, NAME):
        return None
    mpu = sys.modules.get("megatron.mpu")
    if group is None and mpu is not None and torch.distributed.is_initialized():
        rank, group = mpu.get_model_parallel_rank, mpu.get_model_parallel_group

    def _check_overflow(self: Any) -> bool:
        return check_overflow(self, group)

    def clip_master_grads(self: Any, max_norm: float, norm_type: float = 2) -> float:
        return clip(self, max_norm, norm_type, rank, group)

    methods: dict[str, Callable[..., Any]] = {
        "_check_overflow": _check_overflow,
        "clip_master_grads": clip_master_grads,
    }
    return replace_methods(optimizer, methods, library="Megatron-LM")


def check_overflow(self: Any, group: Callable[[], Any] | None) -> bool:
    """Sets ``self.overflow``: whether a gradient of the model has a NaN or an infinity.

    Args:
        self: Megatron-LM's optimizer.
        group: of the processes that share the model and so need the same answer, if there is one.

    Returns:
        The same.
    """
    groups = [*self.fp16_groups, *self.fp32_from_fp32_groups]
    grads = [param.grad for params in groups for param in params if param.grad is not None]
    if grads or group is not None:
        found = any_nonfinite(grads).float() if grads else torch.zeros((), device=_device(self))
        if group is not None:
            maximum = torch.distributed.ReduceOp.MAX
            torch.distributed.all_reduce(found, op=maximum, group=group())
        self.overflow = bool(found.item())
    else:
        self.overflow = False
    return bool(self.overflow)


@torch.no_grad()
def clip(
    self: Any,
    max_norm: float,
    norm_type: float,
    rank: Callable[[], int] | None,
    group: Callable[[], Any] | None,
) -> float:
    """Scales the gradients of the master parameters so that their norm is at most ``max_norm``.

    Args:
        self: Megatron-LM's optimizer.
        max_norm: upper bound of the norm.
        norm_type: p of the p-norm, or ``inf``.
        rank: among the processes that share the model; parameters that all of these have are
            counted on rank 0 alone. None where one process has the whole model.
        group: of those processes.

    Returns:
        The norm before; -1 after an overflow, when nothing is scaled.
    """
    if self.overflow:
        return -1
    params = [param for row in self.optimizer.param_groups for param in row["params"]]
    params = [param for param in params if param.grad is not None]
    counted = [
        param.grad
        for param in params
        if rank is None or getattr(param, "model_parallel", False) or rank() == 0
    ]
    norm_type = float(norm_type)
    total = total_norm(counted, norm_type).to(_device(self), torch.float32)
    if group is not None:
        total = _over_group(total, norm_type, group())
    norm = total.item()
    # Megatron-LM's own comparison: a norm of NaN scales nothing.
    if max_norm / (norm + 1e-6) < 1.0:
        torch._foreach_mul_([param.grad for param in params], max_norm / (norm + 1e-6))
    return norm


def _over_group(total: Tensor, norm_type: float, group: Any) -> Tensor:
    operations = torch.distributed.ReduceOp
    if norm_type == math.inf:
        torch.distributed.all_reduce(total, op=operations.MAX, group=group)
        return total
    powers = total.pow(norm_type)
    torch.distributed.all_reduce(powers, op=operations.SUM, group=group)
    return powers.pow(1.0 / norm_type)


def _device(self: Any) -> torch.device:
    device: torch.device = self.optimizer.param_groups[0]["params"][0].device
    return device


__all__ = ["replace"]

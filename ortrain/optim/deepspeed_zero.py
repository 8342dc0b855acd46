"""ZeRO stages 1 and 2 of DeepSpeed: overflow and norm of all gradients at once.

Written for the methods as ``zero/stage2.py`` of DeepSpeed 0.4 and 0.5 calls them, and
``zero/stage_1_and_2.py`` since. In older versions they wait for the device after every gradient;
newer ones do not, but cast each to float32 or float64 first. The former return a bool and a float,
the latter tensors, and the tensors returned here serve both kinds of caller.

Tried on DeepSpeed 0.19.8 in two processes on the CPU, and less thoroughly on 0.14.5 to 0.19.0; on
anything older with stand-ins that have the attributes that its code uses.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ortrain.optim.clip import any_nonfinite, largest
from ortrain.optim.method import is_instance_of, replace_methods

NAMES = (
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer",
    "deepspeed.runtime.zero.stage2.FP16_DeepSpeedZeroOptimizer",
)
OLDEST, NEWEST = (0, 14), (0, 19)  # tried
ATTRIBUTES = (
    "averaged_gradients",
    "device",
    "dp_process_group",
    "model_parallel_rank",
    "_model_parallel_all_reduce",
)
# Over more elements than this, torch's float32 norm on CPU is off by more than 3e-6 (and by 2e-3
# over 30 M): it adds them up one after another.
PART = 1 << 15


def replace(optimizer: object) -> list[str] | None:
    """Replaces the methods of a ZeRO optimizer.

    Args:
        optimizer: any object.

    Returns:
        What to tell the user; None for an object of another kind.
    """
    if not is_instance_of(optimizer, *NAMES):
        return None
    if reason := _not_called(optimizer):
        return [f"{reason}; its optimizer stays as it is"]
    methods: dict[str, Callable[..., Any]] = {
        "has_overflow_serial": has_overflow_serial,
        "has_overflow_partitioned_grads_serial": has_overflow_partitioned_grads_serial,
        "get_grad_norm_direct": get_grad_norm_direct,
    }
    groups = "fp16_groups" if hasattr(optimizer, "fp16_groups") else "bit16_groups"
    return (
        replace_methods(
            optimizer, methods, library="DeepSpeed ZeRO", attributes=[*ATTRIBUTES, groups]
        )
        or _version_not_tried()
    )


def _not_called(optimizer: Any) -> str:
    """Why DeepSpeed would not call the methods; empty where it will."""
    if getattr(optimizer, "cpu_offload", False):
        return (
            "with offload_optimizer DeepSpeed checks and measures each gradient on its way to the "
            "CPU, not by the methods that would be replaced"
        )
    asked = (
        getattr(optimizer, name, True) for name in ("check_grad_overflow", "compute_grad_norm")
    )
    if not any(asked):
        return "this configuration of DeepSpeed ZeRO asks neither for overflows nor for the norm"
    return ""


def _version_not_tried() -> list[str]:
    version = str(getattr(sys.modules.get("deepspeed"), "__version__", ""))
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        return []
    remark = (
        f"DeepSpeed {version} is not among those that it was tried with, 0.14 to 0.19. The methods "
        "look the same and are replaced; compare a few steps with and without"
    )
    return [remark]


def has_overflow_serial(self: Any, params: Iterable[Tensor], is_grad_list: bool = False) -> Tensor:
    """Whether a parameter's gradient has a NaN or an infinity.

    Args:
        self: the ZeRO optimizer.
        params: parameters.
        is_grad_list: not looked at, as in DeepSpeed.

    Returns:
        bool, of shape [1].
    """
    return _overflow(self, [param.grad for param in params if param.grad is not None])


def has_overflow_partitioned_grads_serial(self: Any) -> Tensor:
    """Whether a gradient of this process's partition has a NaN or an infinity.

    Args:
        self: the ZeRO optimizer.

    Returns:
        bool, of shape [1].
    """
    # fp16_groups before 0.5.7
    groups = self.bit16_groups if hasattr(self, "bit16_groups") else self.fp16_groups
    rows = [self.averaged_gradients[index] for index in range(len(groups))]
    return _overflow(self, [grad for row in rows for grad in row if grad is not None])


def get_grad_norm_direct(
    self: Any, gradients: Iterable[Tensor], params: Iterable[Tensor], norm_type: float = 2
) -> Tensor:
    """The norm of gradients over all data and model parallel processes.

    Squares are taken in float32, in which none of a float16 overflows, and of the parts of a
    gradient added up in float64, as DeepSpeed does of all elements: they agree to 3e-6.

    Args:
        self: the ZeRO optimizer.
        gradients: of this process's partition, with fillers of zeros between them where DeepSpeed
            aligns parameters.
        params: whose gradients they are.
        norm_type: p of the p-norm, or ``inf``.

    Returns:
        0-d float32; -1 where it is not finite.
    """
    dist = _communication()
    norm_type = float(norm_type)
    if norm_type == math.inf:
        total = _maximum(self, list(gradients))
        operation = dist.ReduceOp.MAX
    else:
        own = (g for g in gradients if not getattr(g, "_zero_padding", False))
        counted = [g for g, p in zip(own, params, strict=False) if _counts(self, p)]
        total = _power_sum(self, counted, norm_type)
        operation = dist.ReduceOp.SUM
    dist.all_reduce(total, op=operation, group=self.dp_process_group)
    self._model_parallel_all_reduce(tensor=total, op=operation)
    if norm_type != math.inf:
        total = total.pow(1.0 / norm_type)
    return torch.where(total.isfinite(), total, -1.0)


def _counts(self: Any, parameter: Tensor) -> bool:
    """Whether no other process counts the parameter as well."""
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    parallel = ("model_parallel", "tensor_model_parallel")
    return self.model_parallel_rank == 0 or any(getattr(parameter, p, False) for p in parallel)


def _overflow(self: Any, gradients: Sequence[Tensor]) -> Tensor:
    if not gradients:
        return torch.zeros(1, dtype=torch.bool, device=self.device)
    return any_nonfinite([gradient.detach() for gradient in gradients]).reshape(1)


def _maximum(self: Any, gradients: Sequence[Tensor]) -> Tensor:
    extremes = largest([gradient.detach() for gradient in gradients])
    if not extremes:
        return torch.zeros((), device=self.device)
    return torch.stack([value.float() for value in extremes]).max()


def _power_sum(self: Any, gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    if not gradients:
        return torch.zeros((), device=self.device)
    parts = [part for g in gradients for part in _parts(g.detach())]
    norms = torch._foreach_norm(parts, norm_type, dtype=torch.float32)
    return torch.stack(norms).double().pow(norm_type).sum().float()


def _parts(gradient: Tensor) -> Sequence[Tensor]:
    """The gradient in parts over which a norm in float32 is exact enough."""
    if not gradient.is_cpu or gradient.numel() <= PART:
        return (gradient,)
    return gradient.reshape(-1).split(PART)


def _communication() -> Any:
    """DeepSpeed's own collectives, which before 0.6 were torch's."""
    try:
        return importlib.import_module("deepspeed.comm")
    except ImportError:
        return torch.distributed


__all__ = ["replace"]

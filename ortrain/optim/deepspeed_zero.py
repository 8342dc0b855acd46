"""ZeRO stages 1 and 2 of DeepSpeed: overflow and norm of all gradients at once.

Written for the methods as ``zero/stage2.py`` of DeepSpeed 0.4 and 0.5 calls them, and
``zero/stage_1_and_2.py`` since. In older versions they wait for the device after every gradient;
newer ones do not, but cast each to float32 or float64 first. The former return a bool and a float,
the latter tensors, and the tensors returned here serve both kinds of caller. Tried with stand-ins
that have the attributes that DeepSpeed's code uses, not with DeepSpeed itself.
"""

from __future__ import annotations

import importlib
import math
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


def replace(optimizer: object) -> list[str] | None:
    """Replaces the methods of a ZeRO optimizer.

    Args:
        optimizer: any object.

    Returns:
        Names of methods that it should have and has not, in which case nothing is replaced; None
        for an object of another kind.
    """
    if not is_instance_of(optimizer, *NAMES):
        return None
    methods: dict[str, Callable[..., Any]] = {
        "has_overflow_serial": has_overflow_serial,
        "has_overflow_partitioned_grads_serial": has_overflow_partitioned_grads_serial,
        "get_grad_norm_direct": get_grad_norm_direct,
    }
    return replace_methods(optimizer, methods)


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

    Sums are taken in float32, in which no square of a float16 overflows.

    Args:
        self: the ZeRO optimizer.
        gradients: of this process's partition.
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
        counted = [g for g, p in zip(gradients, params, strict=False) if _counts(self, p)]
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
    norms = torch._foreach_norm([g.detach() for g in gradients], norm_type, dtype=torch.float32)
    return torch.stack(norms).pow(norm_type).sum()


def _communication() -> Any:
    """DeepSpeed's own collectives, which before 0.6 were torch's."""
    try:
        return importlib.import_module("deepspeed.comm")
    except ImportError:
        return torch.distributed


__all__ = ["replace"]

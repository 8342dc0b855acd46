"""Optimizers with the attributes and the slow methods of DeepSpeed, Apex and Megatron-LM.

None of these packages runs here. The methods do what theirs do, tensor by tensor, in float64 where
theirs are in higher precision; classes have their full names, by which they are recognized.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


def named(kind: type, full_name: str) -> type:
    """A subclass under the name that it has in its package."""
    module, _, name = full_name.rpartition(".")
    return type(name, (kind,), {"__module__": module})


def is_finite(tensor: Tensor) -> bool:
    return bool(tensor.double().isfinite().all())


class Collectives:
    """``deepspeed.comm`` or ``torch.distributed`` among processes that all have the same values."""

    ReduceOp = SimpleNamespace(SUM="sum", MAX="max")

    def __init__(self, processes: int = 1) -> None:
        self.processes = processes
        self.calls: list[tuple[Any, Any]] = []

    def all_reduce(self, tensor: Tensor, op: Any = None, group: Any = None) -> None:
        self.calls.append((op, group))
        if "sum" in str(op).lower():
            tensor.mul_(self.processes)


class Zero:
    """``DeepSpeedZeroOptimizer``; ``newer`` methods return tensors, older ones bool and float.

    Its gradients are of the first rows of parameters only, as a partition's.
    """

    def __init__(self, dist: Collectives, newer: bool, dtype: torch.dtype = torch.float16) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = [[(4, 3), (7,)], [(50,)]]
        groups = [
            [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in row]
            for row in shapes
        ]
        setattr(self, "bit16_groups" if newer else "fp16_groups", groups)
        self.averaged_gradients: dict[int, list[Tensor | None]] = {}
        for index, row in enumerate(groups):
            for parameter in row:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype) * 100
            self.averaged_gradients[index] = [p.grad for p in row]
        self.averaged_gradients[1].append(None)
        self.dist, self.newer = dist, newer
        self.device = "cpu"
        self.dp_process_group = "data parallel"
        self.model_parallel_rank = 0
        self.loss_scale = 8.0
        self.model_parallel_calls: list[Any] = []

    def _model_parallel_all_reduce(self, tensor: Tensor, op: Any) -> None:
        self.model_parallel_calls.append(op)

    def has_overflow_serial(self, params: Iterable[Tensor], is_grad_list: bool = False) -> Any:
        bad = not all(is_finite(p.grad) for p in params if p.grad is not None)
        return torch.tensor([bad]) if self.newer else bad

    def has_overflow_partitioned_grads_serial(self) -> Any:
        rows = self.averaged_gradients.values()
        bad = not all(is_finite(g) for row in rows for g in row if g is not None)
        return torch.tensor([bad]) if self.newer else bad

    def has_overflow(self) -> bool:
        """The caller, as it is in either version."""
        overflow = self.has_overflow_partitioned_grads_serial()
        flag = overflow.byte() if self.newer else torch.ByteTensor([overflow])
        self.dist.all_reduce(flag, op=self.dist.ReduceOp.MAX, group=self.dp_process_group)
        return bool(flag[0].item())

    def get_grad_norm_direct(
        self, gradients: Iterable[Tensor], params: Iterable[Tensor], norm_type: float = 2
    ) -> Any:
        total = 0.0
        for gradient, param in zip(gradients, params, strict=False):
            value = gradient.double()
            if norm_type == math.inf:
                total = max(total, float(value.abs().max()))
            elif not getattr(param, "ds_pipe_replicated", False) and (
                getattr(param, "model_parallel", False) or self.model_parallel_rank == 0
            ):
                total += float(value.norm(norm_type)) ** norm_type
        power = 1.0 if norm_type == math.inf else norm_type
        if norm_type != math.inf:
            total *= self.dist.processes
        total = total ** (1 / power)
        total = total if math.isfinite(total) else -1.0
        return torch.tensor(total, dtype=torch.float32) if self.newer else total

    def scaled_global_norm(self) -> float:
        """The caller, as it is in either version."""
        groups = self.bit16_groups if self.newer else self.fp16_groups  # type: ignore[attr-defined]
        norms = [
            self.get_grad_norm_direct(self.averaged_gradients[index], row)
            for index, row in enumerate(groups)
        ]
        if self.newer:
            return float(torch.linalg.vector_norm(torch.stack(norms)))
        return math.sqrt(sum(norm**2.0 for norm in norms))


class LossScaler:
    """Apex's, with or without its fused kernels."""

    def __init__(self, scale: float, dynamic: bool, fused: bool) -> None:
        self._loss_scale, self.dynamic, self.has_fused_kernel = scale, dynamic, fused
        self._has_overflow = False
        self._overflow_buf = torch.zeros(1, dtype=torch.int32)

    def loss_scale(self) -> float:
        return self._loss_scale

    def overflow(self) -> bool:
        """What Apex finds when it updates the scale."""
        if self.has_fused_kernel and not self._has_overflow:
            self._has_overflow = bool(self._overflow_buf.item())
        return self._has_overflow

    def unscale(self, incoming: Tensor, stashed: Tensor | None) -> Tensor:
        """In the precision of the result, which is float32."""
        self._has_overflow = self._has_overflow or not is_finite(incoming)
        result = incoming.float() / self._loss_scale
        return result if stashed is None else result + stashed


def amp(optimizer: torch.optim.Optimizer, masters: bool) -> Any:
    """What ``amp.initialize`` makes of an optimizer."""
    result: Any = optimizer
    stash = result._amp_stash = SimpleNamespace(lazy_init_called=False)
    params = [p for group in optimizer.param_groups for p in group["params"]]

    def lazy_init() -> None:
        if stash.lazy_init_called:
            return
        stash.lazy_init_called = True
        low, full = ([p for p in params if (p.dtype == torch.float32) == f] for f in (False, True))
        stash.all_fp16_params = low
        if masters:
            stash.all_fp32_from_fp16_params = [nn.Parameter(p.detach().float()) for p in low]
            stash.all_fp32_from_fp32_params = full
            stash.all_fp32_from_fp32_grad_stash = [None] * len(full)
        else:
            stash.all_fp16_grad_stash = [None] * len(low)
            stash.all_fp32_params = full
            stash.all_fp32_grad_stash = [None] * len(full)

    def post_backward(scaler: LossScaler) -> None:
        lazy_init()
        if masters:
            pairs = zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True)
            for param, master in pairs:
                if param.grad is not None:
                    master.grad = scaler.unscale(param.grad, master.grad)
            names = [("all_fp32_from_fp32_params", "all_fp32_from_fp32_grad_stash")]
        else:
            names = [
                ("all_fp16_params", "all_fp16_grad_stash"),
                ("all_fp32_params", "all_fp32_grad_stash"),
            ]
        for own, aside in names:
            stashed = getattr(stash, aside)
            for index, param in enumerate(getattr(stash, own)):
                if param.grad is None:
                    param.grad = stashed[index]
                elif stashed[index] is not None or scaler.dynamic or scaler.loss_scale() != 1.0:
                    param.grad = scaler.unscale(param.grad, stashed[index]).to(param.dtype)
                stashed[index] = None

    def zero_grad() -> None:
        raise AssertionError("Apex's own, which cannot free gradients")

    result._amp_lazy_init = lazy_init
    result._post_amp_backward = post_backward
    result.zero_grad = zero_grad
    return result


class Megatron:
    """Megatron-LM 1.1.5's ``FP16_Optimizer``."""

    def __init__(
        self, rank: Callable[[], int] = lambda: 0, dtype: torch.dtype = torch.float16
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        low = [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in [(4, 3), (7,)]]
        full = nn.Parameter(torch.randn(50, generator=generator))
        masters = [nn.Parameter(p.detach().float()) for p in low]
        unused = nn.Parameter(torch.zeros(3))
        self.fp16_groups, self.fp32_from_fp32_groups = [low], [[full, unused]]
        self.optimizer = torch.optim.SGD([*masters, full, unused], lr=0.1)
        for parameter in [*low, *masters, full]:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        self.overflow = False
        self.rank = rank

    def _check_overflow(self) -> None:
        groups = [*self.fp16_groups, *self.fp32_from_fp32_groups]
        grads = [p.grad for row in groups for p in row if p.grad is not None]
        self.overflow = not all(is_finite(g) for g in grads)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> float:
        if self.overflow:
            return -1
        params = [p for p in self.optimizer.param_groups[0]["params"] if p.grad is not None]
        counted = [p for p in params if getattr(p, "model_parallel", False) or self.rank() == 0]
        if norm_type == math.inf:
            norm = max(float(p.grad.abs().max()) for p in counted)
        else:
            powers = [float(p.grad.double().norm(norm_type)) ** norm_type for p in counted]
            norm = sum(powers) ** (1 / norm_type)
        if max_norm / (norm + 1e-6) < 1:
            for param in params:
                param.grad.mul_(max_norm / (norm + 1e-6))
        return norm

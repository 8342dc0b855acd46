"""The executors by the names under which users choose them."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from ortrain.runtime.base import Executor
from ortrain.runtime.onnxruntime import OnnxRuntimeExecutor

if TYPE_CHECKING:
    import torch


def candidates(device: torch.device, dtypes: Collection[torch.dtype]) -> tuple[str, ...]:
    """The engines that ``"auto"`` tries, in the order in which they are tried.

    ``"aten"`` is none of them until more has been measured of it; who asks for it has it.

    Args:
        device: that the tensors are on.
        dtypes: of the tensors, and that autocast casts them to.
    """
    return ("onnxruntime",) if device.type == "cpu" and serves("onnxruntime", dtypes) else ()


def serves(engine: str, dtypes: Collection[torch.dtype]) -> bool:
    """Whether an engine has kernels for tensors of some floating-point dtypes.

    Of float16 and bfloat16 onnxruntime's provider of the CPU has few.
    """
    narrow = [dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize < 4]
    return engine == "aten" or not narrow


def executor(
    engine: str,
    *,
    device: torch.device,
    provider: str | None = None,
    threads: int = 0,
    arena: bool = True,
) -> Executor:
    """The executor of an engine.

    Args:
        engine: ``"onnxruntime"``, ``"aten"`` or ``"reference"``.
        device: of the tensors that its programs take.
        provider: execution provider of onnxruntime; None for that of the CPU.
        threads: inside an operator of onnxruntime; 0 leaves it to onnxruntime.
        arena: whether onnxruntime keeps the memory of a run for the next ones.
    """
    if engine == "aten":
        from ortrain.runtime.aten import AtenExecutor

        return AtenExecutor(device)
    if engine == "reference":
        from ortrain.runtime.reference import ReferenceExecutor

        return ReferenceExecutor()
    return OnnxRuntimeExecutor(provider or "CPUExecutionProvider", threads, arena=arena)

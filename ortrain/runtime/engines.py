"""The executors by the names under which users choose them."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # they load onnx, which a run that is watched does not need
    import torch

    from ortrain.runtime.base import Executor
    from ortrain.runtime.memory import Ceiling


def candidates(
    device: torch.device,
    dtypes: Collection[torch.dtype],
    provider: str | None = None,
    *,
    cuda_graphs: bool = False,
) -> tuple[str, ...]:
    """The engines that ``"auto"`` may try.

    Args:
        device: that the tensors are on.
        dtypes: of the tensors, and that autocast casts them to.
        provider: execution provider that was asked for, which only onnxruntime has.
        cuda_graphs: whether PyTorch's operators are recorded and replayed, on a GPU.
    """
    if records(device):
        # A function called by Python is no match for eager: 1.3 to 1.6 times its time of BERT-base
        # at 8x128 on an H100, where a recording takes 0.27 (bfloat16) to 0.77 (float32).
        return ("aten",) if cuda_graphs and provider is None else ()
    if device.type != "cpu":
        return ()
    known = ("onnxruntime", "aten") if provider is None else ("onnxruntime",)
    return tuple(engine for engine in known if serves(engine, dtypes))


def records(device: torch.device) -> bool:
    """Whether PyTorch's operators can be recorded there and replayed."""
    return device.type == "cuda"


def serves(engine: str, dtypes: Collection[torch.dtype]) -> bool:
    """Whether an engine has kernels for tensors of some floating-point dtypes.

    Of float16 and bfloat16 onnxruntime's provider of the CPU has few.
    """
    return engine == "aten" or not are_narrow(dtypes)


def are_narrow(dtypes: Collection[torch.dtype]) -> bool:
    """Whether some are of floating-point numbers below float32."""
    return any(dtype.is_floating_point and dtype.itemsize < 4 for dtype in dtypes)


def executor(
    engine: str,
    *,
    device: torch.device,
    provider: str | None = None,
    threads: int = 0,
    arena: bool = True,
    cuda_graphs: bool = False,
    ceiling: Ceiling | None = None,
) -> Executor:
    """The executor of an engine.

    Args:
        engine: ``"onnxruntime"``, ``"aten"`` or ``"reference"``.
        device: of the tensors that its programs take.
        provider: execution provider of onnxruntime; None for that of the CPU.
        threads: inside an operator of onnxruntime; 0 leaves it to onnxruntime.
        arena: whether the memory of a run is kept for the next ones, or else goes back to the
            system as soon as it is freed.
        cuda_graphs: whether PyTorch's operators are recorded and replayed, on a GPU.
        ceiling: above which PyTorch's operators give back what is kept of memory.

    Raises:
        ValueError: there is no such engine.
    """
    if engine == "aten":
        from ortrain.runtime.aten import AtenExecutor
        from ortrain.runtime.aten.graphs import recorders

        recorder = recorders.recorder(device) if cuda_graphs else None
        return AtenExecutor(device, recorder, arena=arena, ceiling=ceiling)
    if engine == "reference":
        from ortrain.runtime.reference import ReferenceExecutor

        return ReferenceExecutor()
    if engine != "onnxruntime":
        raise ValueError(f"{engine!r} is no engine that runs graphs")
    from ortrain.runtime.onnxruntime import OnnxRuntimeExecutor  # 16 MiB, and 20 ms

    return OnnxRuntimeExecutor(provider or "CPUExecutionProvider", threads, arena=arena)

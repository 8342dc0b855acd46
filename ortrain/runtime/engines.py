"""The executors by the names under which users choose them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ortrain.cpuinfo import cpuinfo

if TYPE_CHECKING:  # they load onnx, which a run that is watched does not need
    import onnx_ir as ir
    import torch

    from ortrain.runtime.base import Executor
    from ortrain.runtime.memory import Ceiling

# Multiplications a node of the forward below which PyTorch's calls, 3 to 5 us each, cost more than
# its kernels gain, and above which they are the faster ones; forward and backward in ms, float32,
# on an AMD EPYC of the fourth generation (eager, onnxruntime, aten):
#   perceptron, width 64, batch 32             0.07 M    0.25   0.29   0.36
#   2 layers of a transformer, width 64, 8x32  0.5 M     9.7    6.6    8.4
#   the same, width 128, 8x32                  2 M      10.7   10.0    9.3
#   convolutions, 16 images of 28x28           2 M       2.6    4.9    3.1
#   2 layers of a transformer, width 128, 16x64  8 M    38     36     26
#   the same, width 256, 16x64                 30 M     91     86     69
#   4 layers of BERT-base, 8x128               200 M  1415   1191   1110
_LIGHT, _HEAVY = 1 << 18, 1 << 22
# What PyTorch would be called for at each step; an LSTM, 32x40: 85, 127, 150.
_LOOPS = {"LSTM", "GRU", "RNN", "Scan", "Loop"}
# Where heavy nodes are products, the two are close. Of BERT-base at 8x128 onnxruntime is 0.04 ahead
# on an EPYC of the fifth generation and 0.01 on one of the fourth, of GPT-2 0.09 behind; at
# convolutions it takes 1.7 times as long. Of a Xeon's products, MKL's are 1.3 to 1.8 times as fast.
_CONVOLUTIONS = {"Conv", "ConvTranspose"}
_NO_RIVALS = {"GenuineIntel"}


class LineUp(NamedTuple):
    """Engines for a program.

    Attributes:
        starters: that may be the fastest; one at least.
        rivals: that may be a little faster than these, and are far from slow.
    """

    starters: tuple[str, ...]
    rivals: tuple[str, ...] = ()


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


def line_up(known: Sequence[str], graph: ir.Graph, multiplications: int) -> LineUp:
    """Which of some engines are tried for a program, and when.

    Args:
        known: engines that can run it.
        graph: of its forward.
        multiplications: that it does at the sizes of a call.
    """
    if len(known) < 2:
        return LineUp(tuple(known))
    nodes = [node.op_type for node in graph]
    each = multiplications / max(len(nodes), 1)
    slow = ""
    if each < _LIGHT or not _LOOPS.isdisjoint(nodes):
        slow = "aten"
    elif each > _HEAVY:
        slow = "onnxruntime"
    starters = tuple(engine for engine in known if engine != slow)
    far = slow == "aten" or not _CONVOLUTIONS.isdisjoint(nodes)
    if far or cpuinfo().get("vendor_id") in _NO_RIVALS:
        return LineUp(starters)
    return LineUp(starters, tuple(engine for engine in known if engine == slow))


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
    mixed: bool = False,
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
        mixed: whether there are nodes that PyTorch alone runs, which onnxruntime then leaves to it.

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

    own = OnnxRuntimeExecutor(provider or "CPUExecutionProvider", threads, arena=arena)
    if not mixed:
        return own
    from ortrain.runtime.aten import AtenExecutor
    from ortrain.runtime.regions import RegionsExecutor

    return RegionsExecutor([own, AtenExecutor(device, arena=arena)])

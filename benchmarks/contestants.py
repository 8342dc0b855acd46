"""The ways to run a training step that users would choose between."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import processor
import torch
from torch import nn
from workloads import Batch, Workload, loss_of


def plain(module: nn.Module, **more: Any) -> nn.Module:
    """PyTorch's eager mode."""
    return module


def compiled(module: nn.Module, **more: Any) -> Any:
    """torch.compile with its defaults."""
    return torch.compile(module)


def recorded(module: nn.Module, **more: Any) -> Any:
    """torch.compile with CUDA graphs."""
    return torch.compile(module, mode="reduce-overhead")


def ours(engine: str, **chosen: Any) -> Callable[..., Any]:
    """ORTModule with one engine, which no fallback replaces, or with its defaults, ``auto``.

    Args:
        engine: that it is.
        chosen: further options.
    """

    def wrap(module: nn.Module, **more: Any) -> Any:
        from ortrain import Options, ORTModule  # what it takes of the memory is measured

        settings: dict[str, Any] = {"engine": engine, **chosen, **more}
        if engine != "auto":
            settings["fallback"] = "raise"
        return ORTModule(module, options=Options(**settings))

    return wrap


@contextmanager
def bf16_products() -> Iterator[None]:
    """Products and convolutions of float32 tensors are computed in bfloat16, in all of PyTorch."""
    backend: Any = torch.backends.mkldnn
    parts = [backend.matmul, backend.conv]
    before = [part.fp32_precision for part in parts]
    try:
        for part in parts:
            part.fp32_precision = "bf16"
        yield
    finally:
        for part, value in zip(parts, before, strict=True):
            part.fp32_precision = value


# --- what needs a process of its own --------------------------------------------------------------


@dataclass(frozen=True)
class Apart:
    """A process of its own.

    Attributes:
        environment: its variables; files that they name go into the folder.
        absent: why it cannot be had here; empty where it can.
    """

    environment: Callable[[Path], dict[str, str]]
    absent: Callable[[], str]


def new_cache(folder: Path) -> dict[str, str]:
    """Nothing that an earlier process compiled."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder)}


def no_compiler() -> str:
    return "" if shutil.which("g++") else "there is no g++"


def intel_claimed(folder: Path) -> dict[str, str]:
    """MKL takes the processor for Intel's: the function that it asks is replaced.

    PyTorch's wheels export it, so that a library that is loaded before them has the say.
    """
    source, library = folder / "intel.c", folder / "intel.so"
    source.write_text("int mkl_serv_intel_cpu_true(void) { return 1; }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return {"LD_PRELOAD": str(library)}


def no_amd_or_compiler() -> str:
    fields = processor.first_processor(processor.CPUINFO.read_text())
    if fields.get("vendor_id") != "AuthenticAMD":
        return "MKL is fast by itself: the processor is not AMD's"
    return "" if shutil.which("gcc") else "there is no gcc"


# The presence of torch.compile in a process makes small eager steps half as fast.
COMPILER = Apart(new_cache, no_compiler)
MKL = Apart(intel_claimed, no_amd_or_compiler)


# --- contestants ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One way to run a training step.

    Attributes:
        wrap: makes of a module what is called; ours takes options.
        precision: that of the products; ``"bf16"`` of contestants that compute in bfloat16.
        autocast: whether the forward runs under autocast.
        settings: of the whole process, for the time of a turn.
        apart: the process that it needs; None shares one with the others.
        device: on which it is a contestant; None on all.
        reads_all: whether ours is not told that only the loss is read, where that is so.
    """

    wrap: Callable[..., Any] = plain
    precision: str = "fp32"
    autocast: bool = False
    settings: Callable[[], AbstractContextManager[None]] = nullcontext
    apart: Apart | None = None
    device: str | None = None
    reads_all: bool = False

    @property
    def base(self) -> str:
        """Eager PyTorch of the same precision."""
        return "eager" if self.precision == "fp32" else "eager-bf16"

    def absent(self, device: str) -> str:
        """Why it cannot be had here; empty where it can."""
        if self.device not in (None, device):
            return f"only on {self.device}"
        return "" if self.apart is None else self.apart.absent()

    def loss(self, model: Any, batch: Batch, device: str = "cpu") -> torch.Tensor:
        """The forward in its precision."""
        if not self.autocast:
            return loss_of(model(**batch))
        with torch.autocast(device, torch.bfloat16):
            return loss_of(model(**batch))


BF16: dict[str, Any] = {"precision": "bf16", "autocast": True}
WHOLE: dict[str, Any] = {"device": "cpu", "reads_all": True}
CONTESTANTS = {
    "eager": Contestant(),
    "eager-mkl-fast": Contestant(apart=MKL, device="cpu"),
    "eager-bf16-products": Contestant(precision="bf16", settings=bf16_products, device="cpu"),
    "eager-bf16": Contestant(**BF16),
    "compile": Contestant(wrap=compiled, apart=COMPILER),
    "compile-bf16": Contestant(wrap=compiled, apart=COMPILER, **BF16),
    "compile-graphs": Contestant(wrap=recorded, apart=COMPILER, device="cuda"),
    "compile-graphs-bf16": Contestant(wrap=recorded, apart=COMPILER, device="cuda", **BF16),
    "ort": Contestant(wrap=ours("onnxruntime")),
    "aten": Contestant(wrap=ours("aten")),
    "aten-bf16": Contestant(wrap=ours("aten"), **BF16),
    "aten-budget-bf16": Contestant(wrap=ours("aten", memory_budget=1.0), **BF16),
    "aten-graphs": Contestant(wrap=ours("aten", cuda_graphs=True), device="cuda"),
    "aten-graphs-bf16": Contestant(wrap=ours("aten", cuda_graphs=True), device="cuda", **BF16),
    "aten-whole": Contestant(wrap=ours("aten", skip_padding=False), **WHOLE),
    "aten-whole-bf16": Contestant(wrap=ours("aten", skip_padding=False), **WHOLE, **BF16),
    "auto": Contestant(wrap=ours("auto")),
    "auto-bf16": Contestant(wrap=ours("auto"), **BF16),
}


class Training:
    """A contestant's training of a workload: model, optimizer and batches are its own.

    Args:
        name: of the contestant.
        workload: what it trains.
        device: on which.
    """

    # A contest of ours may take three turns of up to 51 steps for each of the two.
    MOST_STEPS_OF_A_CONTEST = 400
    # A long run, as ORTTrainer tells of one: where nobody knows, a graph waits, and rivals longer.
    STEPS_OF_A_RUN = 1_000_000

    def __init__(self, name: str, workload: Workload, device: str = "cpu") -> None:
        self.name, self.contestant, self.device = name, CONTESTANTS[name], device
        module, batches = workload.make()
        self.only_loss = workload.only_loss and not self.contestant.reads_all
        self.model: Any = module.to(device)
        self.batches = [{key: value.to(device) for key, value in b.items()} for b in batches]
        self.parameters = [*self.model.parameters()]
        self.optimizer = (
            torch.optim.AdamW(self.parameters, lr=1e-4, fused=True) if workload.optimizer else None
        )
        self.steps = 0

    def wrap(self, **more: Any) -> None:
        """Makes of the model what is called, with further options of ours; to be done first."""
        self.model = self.contestant.wrap(self.model, **more)
        if hasattr(self.model, "steps_to_come"):
            self.model.steps_to_come = self.STEPS_OF_A_RUN
        if self.only_loss and hasattr(self.model, "only_loss_is_read"):
            self.model.only_loss_is_read = True

    def step(self) -> None:
        """Forward, backward, and the optimizer where there is one."""
        batch = self.batches[self.steps % len(self.batches)]
        self.contestant.loss(self.model, batch, self.device).backward()
        if self.optimizer is not None:
            self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        self.steps += 1

    def turn(self, steps: int, warm_up: int = 1) -> float:
        """Milliseconds of so many steps; by default one before, as the others filled the caches."""
        with self.contestant.settings():
            for _ in range(warm_up):
                self.step()
            self._wait()
            start = time.perf_counter()
            for _ in range(steps):
                self.step()
            self._wait()
            return (time.perf_counter() - start) * 1e3

    def settle(self) -> None:
        """Takes steps until memory pools are filled and the default engine has decided.

        What is recorded is so at a batch's third step: the backward once its forward is replayed.
        """
        with self.contestant.settings():
            for number in range(self.MOST_STEPS_OF_A_CONTEST):
                contest = getattr(self.report, "contest", None)
                records = getattr(self.report, "replays", None) is not None
                least = 4 * len(self.batches) if records else 3
                runs = contest is not None and (not contest.winner or contest.left)
                if number >= least and not runs and not getattr(contest, "rivals", ()):
                    return
                self.step()

    def ran(self) -> str:
        """What ran the last step, as ORTModule tells it; empty for the others."""
        report = self.report
        if report is None:
            return ""
        why = report.engine if report.mode == "graph" else report.reason
        return f"{report.mode} ({why.partition(chr(10))[0]})"

    @property
    def captures(self) -> int:
        """How many times the module was captured or, by torch.compile, anything in the process."""
        if self.report is not None:
            return int(self.report.captures)
        return captures_of_process(self.name)

    @property
    def report(self) -> Any:
        """ORTModule's; None of others."""
        return getattr(self.model, "report", None)

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


def taken_over(graphs: list[int]) -> int | None:
    """The first step from which on nine calls in ten are a graph's; None where there is none.

    Args:
        graphs: how many calls were a graph's, after each step.
    """
    for step, before in enumerate([0, *graphs[:-1]]):
        if graphs[step] > before and graphs[-1] - before >= 0.9 * (len(graphs) - step):
            return step + 1
    return None


def captures_of_process(name: str) -> int:
    """Graphs that torch.compile has made in this process; none for other contestants."""
    if CONTESTANTS[name].apart is not COMPILER:
        return 0
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])

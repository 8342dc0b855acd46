"""What ORTModule did and why, for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass, field

from ortrain.autodiff.held import megabytes
from ortrain.runtime.replays import Replays


@dataclass
class Contest:
    """Seconds of the graph, by the engines that run it, and of eager PyTorch over like steps.

    Attributes:
        engines: engine → seconds per measured step, forward and backward.
        eager: likewise.
        winner: ``"graph"`` or ``"eager"``; empty while it runs.
        engine: that has won, where the graph has.
        left: calls until the decision, as far as can be told while it runs: steps may get slower,
            and a close result takes another round.
        waits: whether the run has been too short until now for a graph to pay.
        refused: engine → why it cannot run the graph.
    """

    engines: dict[str, list[float]] = field(default_factory=dict)
    eager: list[float] = field(default_factory=list)
    winner: str = ""
    left: int = 0
    engine: str = ""
    waits: bool = False
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def graph(self) -> list[float]:
        """Seconds per measured step of the engine that has won, or else of the fastest."""
        times = self.engines.get(self.engine)
        return times or min(self.engines.values(), key=median, default=[])

    @property
    def speedup(self) -> float:
        """How many times as fast as eager the graph is; 0 where that was not measured."""
        graph, eager = median(self.graph), median(self.eager)
        return eager / graph if graph and eager else 0.0

    def __str__(self) -> str:
        if not self.winner and self.waits:
            return (
                f"waits: after {len(self.eager)} eager steps or more the run is still too short to "
                "pay for a capture"
            )
        if not self.winner:
            timed = sum(map(len, self.engines.values()))
            return (
                f"running, {self.left} calls or more to go: {timed} graph and "
                f"{len(self.eager)} eager steps timed"
            )
        if len(self.engines) < 2:
            graph = _seconds(median(self.graph))
        else:
            parts = [f"on {name} {_seconds(median(t))}" for name, t in self.engines.items()]
            graph = ", ".join(parts)
        counts = [*(str(len(times)) for times in self.engines.values()), str(len(self.eager))]
        return (
            f"{self.winner} is faster: graph {graph}, eager {_seconds(median(self.eager))} "
            f"(medians of {' and '.join(counts)} steps)"
            + "".join(f"; not on {name}: {why}" for name, why in self.refused.items())
        )


@dataclass
class Report:
    """State of an ORTModule after its first forward.

    Attributes:
        mode: ``"graph"`` where the last of these calls ran the compiled graph, else ``"eager"``.
        reason: why not the graph; empty in graph mode.
        stages: seconds of each stage of the last build.
        engine: what runs the graph, for example ``"onnxruntime CPUExecutionProvider"``.
        replays: what has come of ``cuda_graphs``; None where nothing is recorded.
        graph_calls: calls that ran the compiled graph.
        eager_calls: calls that ran in PyTorch.
        astray: calls among them at whose values the code went another way than the graph.
        recovered: backwards that PyTorch ran because the graph's had failed.
        captures: how many times the module was captured.
        nodes: nodes of each program before and after lowering, by name of the program.
        left_out: calls of the graph in which work on tokens that nobody reads was left out.
        left_out_share: of the multiplications of these calls, on average.
        saved_bytes: kept between forward and backward, at the sizes of the capture.
        peak_bytes: the most that a step is predicted to hold beyond weights and inputs, likewise.
        contest: the measurement behind ``engine="auto"``.
        certificate: how closely the graph agreed with PyTorch before it was used, for example
            ``"loss 1e-07, gradients 4e-07 of 67 tensors"``.
        inference: the same for calls without gradients, where the module also trains.
    """

    mode: str = ""
    reason: str = ""
    stages: dict[str, float] = field(default_factory=dict)
    engine: str = ""
    replays: Replays | None = None
    graph_calls: int = 0
    eager_calls: int = 0
    astray: int = 0
    recovered: int = 0
    captures: int = 0
    nodes: dict[str, tuple[int, int]] = field(default_factory=dict)
    left_out: int = 0
    left_out_share: float = 0.0
    saved_bytes: int = 0
    peak_bytes: int = 0
    contest: Contest | None = None
    certificate: str = ""
    inference: Report | None = None

    def leave_out(self, share: float) -> None:
        """Counts a call in which this share of the multiplications was left out."""
        self.left_out += 1
        self.left_out_share += (share - self.left_out_share) / self.left_out

    def __str__(self) -> str:
        rows = [f"ORTModule: {self._last()}", *self._since()]
        if self.inference is not None:
            rows.append(f"  without gradients: {self.inference._last()}")
            rows += [f"  {row}" for row in self.inference._since()]
        return "\n".join(rows)

    def _last(self) -> str:
        """What ran the last call."""
        return (self.mode or "not called yet") + (f" ({self.reason})" if self.reason else "")

    def _since(self) -> list[str]:
        if not self.mode:
            return []
        rows = [f"  calls     {self.graph_calls} as a graph, {self.eager_calls} in PyTorch"]
        if self.astray:
            rows.append(f"  astray    {self.astray} of them by branches on values")
        if self.recovered:
            rows.append(f"  recovered {self.recovered} backwards of the graph, in PyTorch")
        return rows + self.rows()

    def rows(self) -> list[str]:
        """What was built, a line each."""
        rows = []
        if self.engine:
            rows.append(f"  engine    {self.engine}")
        if self.replays is not None:
            rows.append(f"  CUDA graphs  {self.replays}")
        if self.captures:
            rows.append(f"  captures  {self.captures}")
        if self.stages:
            total = sum(self.stages.values())
            parts = ", ".join(f"{k} {_seconds(v)}" for k, v in self.stages.items())
            rows.append(f"  stages    {_seconds(total)}: {parts}")
        for name, (before, after) in self.nodes.items():
            rows.append(f"  {name:<9} {before} nodes, {after} after lowering")
        if self.left_out:
            share = f"{self.left_out_share:.0%} of the multiplications"
            rows.append(f"  tokens    {share} left out in {self.left_out} calls: nobody reads them")
        if self.saved_bytes:
            most = f", {megabytes(self.peak_bytes)} at most" if self.peak_bytes else ""
            rows.append(f"  saved     {megabytes(self.saved_bytes)} between the passes{most}")
        if self.certificate:
            rows.append(f"  certificate  {self.certificate}")
        if self.contest is not None:
            rows.append(f"  contest   {self.contest}")
        return rows


def median(values: list[float]) -> float:
    """The middle value (the lower of two)."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2] if ordered else 0.0


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} µs"

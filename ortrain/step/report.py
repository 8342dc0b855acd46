"""What ORTModule did and why, for people and for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ortrain.runtime.replays import Replays
from ortrain.step.overhead import Overhead
from ortrain.units import megabytes

# So many reasons are told why tokens are computed that nobody reads.
MOST_DENSE = 3


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
        rivals: engines that the one that has won is to meet where the run is long enough.
        recalled: whether an earlier process has found it.
        cost: seconds that it has taken in all: to make the graphs and compare them with the module,
            and, once it is decided, what the steps of the others took longer than the winner's.
    """

    engines: dict[str, list[float]] = field(default_factory=dict)
    eager: list[float] = field(default_factory=list)
    winner: str = ""
    left: int = 0
    engine: str = ""
    waits: bool = False
    refused: dict[str, str] = field(default_factory=dict)
    rivals: tuple[str, ...] = ()
    recalled: bool = False
    cost: float = 0.0

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
        step = median(self.eager if self.winner == "eager" else self.graph)
        cost = f"; it cost {_seconds(self.cost)} in all" if self.cost else ""
        cost += f", as much as {max(round(self.cost / step), 1)} steps" if cost and step else ""
        return (
            f"{self.winner} is faster: graph {graph}, eager {_seconds(median(self.eager))} "
            f"(medians of {' and '.join(counts)} steps){cost}"
            + "".join(f"; not on {name}: {why}" for name, why in self.refused.items())
            + "".join(f"; a long run will try {name} as well" for name in self.rivals)
            + "; found by an earlier process" * self.recalled
        )


class Saving(NamedTuple):
    """What leaving tokens out saves of one call.

    Attributes:
        share: of its multiplications; 0 where all tokens are computed.
        densities: which tokens are read, in words → their share of the places of the batch.
    """

    share: float
    densities: dict[str, float]


def alone(densities: Mapping[str, float]) -> dict[str, float]:
    """The densities without those of unions of what is there by itself."""
    found = {}
    for words, density in densities.items():
        kinds, _, of = words.partition(" of ")
        parts = [f"{kind} of {of}" if of else kind for kind in kinds.split(" or ")]
        if len(parts) == 1 or not {*parts} <= densities.keys():
            found[words] = density
    return found


# What a user does who wants an output to show less, by what is shown then.
_WAYS = {
    "tokens": "Options(skip_padding=True) has zeros in it at padding, which is left out then",
    "loss": "where nobody reads more than the loss, say model.only_loss_is_read = True, as "
    "ORTTrainer does in training steps",
}


# What a user has written for an operator that often stands in the way.
_OPERATORS = {
    "ReduceSum": "a sum or mean",
    "ReduceMean": "a mean",
    "ReduceMax": "a maximum",
    "ReduceMin": "a minimum",
    "ReduceL2": "a norm",
    "CumSum": "a cumulative sum",
    "Conv": "a convolution",
    "BatchNorm": "batch normalization",
    "MatMul": "a product of two tensors",
    "Gather": "a selection",
    "Slice": "a slice",
    "Softmax": "a softmax",
    "LSTM": "an LSTM",
    "GRU": "a GRU",
    "RNN": "an RNN",
}


@dataclass(frozen=True)
class Dense:
    """What is computed for all tokens, and why.

    Attributes:
        kind: an ``output`` shows them; an ``operator`` reads all of its input; the ``mask`` of an
            attention shuts none out for certain; ``no mask`` where it has none.
        name: of the output or the operator.
        where: the module and the line of the user's code; empty where they are not known.
        others: how many more there are of the same line.
        share: of the call's multiplications that is behind it.
        helps: what may be shown for less to be computed: ``loss``, ``tokens``.
    """

    kind: str
    name: str
    where: str
    others: int
    share: float
    helps: tuple[str, ...] = ()

    def __str__(self) -> str:
        at = f" at {self.where}" if self.where else ""
        at += f" and {self.others} more like it" if self.others else ""
        if self.kind == "output":
            return f"the output {self.name!r} shows all tokens"
        if self.kind == "operator":
            name = _OPERATORS.get(self.name, f"the operator {self.name}")
            return f"{name}{at} reads all tokens, padding too"
        if self.kind == "mask":
            return f"the attention{at} has a mask that shuts no token out for certain"
        return f"the attention{at} is given no mask, and sees all tokens"


@dataclass
class Report:
    """State of an ORTModule after its first forward.

    Attributes:
        mode: ``"graph"`` where the last of these calls ran as graphs, else ``"eager"``.
        reason: why not the graph; empty in graph mode.
        stages: seconds of each stage of the last build.
        engine: what runs the graph, for example ``"onnxruntime CPUExecutionProvider"``.
        replays: what has come of ``cuda_graphs``; None where nothing is recorded.
        graph_calls: calls that ran the compiled graph.
        eager_calls: calls that ran in PyTorch.
        astray: calls among them at whose values the code went another way than the graph.
        recovered: backwards that PyTorch ran because the graph's had failed.
        captures: how many times the module was captured, or a part of it between breaks.
        breaks: why graphs end within the module's code, which PyTorch runs up to the next one.
        refused: why captures, or statements of them, are no graphs, and PyTorch runs them.
        nodes: nodes of each program before and after lowering, by name of the program.
        left_out: calls of the graph in which work on tokens that nobody reads was left out.
        left_out_share: of the multiplications of these calls, on average.
        counted: calls of the graph whose tokens were counted.
        uncounted: those that were too small for that to pay.
        densities: which tokens are read, in words → their share of the places of a batch, on
            average over the calls that were counted.
        dense: what the last capture computes for all tokens all the same, the most work first.
        blocks: of losses whose logits are there for some rows at a time: classes, and rows at most.
        saved_bytes: kept between forward and backward, at the sizes of the capture.
        peak_bytes: the most that a step is predicted to hold beyond weights and inputs, likewise.
        contest: the measurement behind ``engine="auto"``.
        certificate: how closely the graph agreed with PyTorch before it was used, for example
            ``"loss 1e-07, gradients 4e-07 of 67 tensors"``.
        overhead: seconds that were no steps; None where they are not counted.
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
    breaks: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    nodes: dict[str, tuple[int, int]] = field(default_factory=dict)
    left_out: int = 0
    left_out_share: float = 0.0
    counted: int = 0
    uncounted: int = 0
    densities: dict[str, float] = field(default_factory=dict)
    dense: list[Dense] = field(default_factory=list)
    blocks: tuple[tuple[int, int], ...] = ()
    saved_bytes: int = 0
    peak_bytes: int = 0
    contest: Contest | None = None
    certificate: str = ""
    overhead: Overhead | None = None
    inference: Report | None = None
    _calls: Counter[str] = field(default_factory=Counter, repr=False)

    def note_tokens(self, saving: Saving | None) -> None:
        """Counts a call of a graph that may leave tokens out; None is one that was too small."""
        if saving is None:
            self.uncounted += 1
            return
        self.counted += 1
        for words, density in saving.densities.items():
            self._calls[words] += 1
            mean = self.densities.get(words, 0.0)
            self.densities[words] = mean + (density - mean) / self._calls[words]
        if saving.share:
            self.left_out += 1
            self.left_out_share += (saving.share - self.left_out_share) / self.left_out

    @property
    def kept(self) -> tuple[str, ...]:
        """:attr:`refused`, by its name of before."""
        return self.refused

    @property
    def parts(self) -> Mapping[str, Report]:
        """Always empty: what lies between breaks is counted in this report."""
        return {}

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
        if self.refused:
            reasons = "; ".join(dict.fromkeys(self.refused))
            rows.append(f"  refused   PyTorch runs captures, or statements of them: {reasons}")
        if self.breaks:
            rows.append(f"  breaks    PyTorch runs code between graphs: {'; '.join(self.breaks)}")
        if self.stages:
            total = sum(self.stages.values())
            parts = ", ".join(f"{k} {_seconds(v)}" for k, v in self.stages.items())
            rows.append(f"  stages    {_seconds(total)}: {parts}")
        for name, (before, after) in self.nodes.items():
            rows.append(f"  {name:<9} {before} nodes, {after} after lowering")
        rows += self._tokens()
        for classes, count in self.blocks:
            rows.append(
                f"  logits    of {classes} classes are made for {count} rows at a time: nobody "
                "reads more than their loss"
            )
        if self.saved_bytes:
            most = f", {megabytes(self.peak_bytes)} at most" if self.peak_bytes else ""
            rows.append(f"  saved     {megabytes(self.saved_bytes)} between the passes{most}")
        if self.certificate:
            rows.append(f"  certificate  {self.certificate}")
        if self.contest is not None:
            rows.append(f"  contest   {self.contest}")
        if self.overhead is not None:
            rows.append(f"  overhead  {self.overhead}")
        return rows

    def _tokens(self) -> list[str]:
        """What was left out of the work on tokens, which are read, and why others are computed."""
        if not (self.counted or self.uncounted or self.dense):
            return []
        told = "all computed"
        if self.left_out:
            share = f"{self.left_out_share:.0%} of the multiplications"
            told = f"{share} left out in {self.left_out} calls: nobody reads them"
        elif self.counted:
            told += ": to leave out those that nobody reads would save too little"
        elif self.uncounted:
            told += ": the calls are too small for others to pay"
        lines = []
        if self.densities:
            parts = (f"{density:.1%} {words}" for words, density in alone(self.densities).items())
            lines.append(f"of all places {', '.join(parts)}")
        lines += [f"{each.share:.0%} is for all tokens: {each}" for each in self.dense[:MOST_DENSE]]
        if len(self.dense) > MOST_DENSE:
            lines.append(f"and {len(self.dense) - MOST_DENSE} more of the like")
        helps = dict.fromkeys(way for each in self.dense for way in each.helps)
        lines += [_WAYS[way] for way in helps]
        return [f"  tokens    {told}", *(f"            {line}" for line in lines)]


def median(values: list[float]) -> float:
    """The middle value (the lower of two)."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2] if ordered else 0.0


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} µs"

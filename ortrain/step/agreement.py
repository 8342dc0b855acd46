"""Whether a graph is as close to what a module means as PyTorch is.

What differs by more than roundings is measured against PyTorch on tensors that are rounded
otherwise, and then against the truth: a run of the module in float64, which takes twice the memory.
In float16 and bfloat16 everything differs: there PyTorch's own distance from float32 decides. Where
the graph is further away, other runs of both do, on tensors that are rounded otherwise. A number
that tips at a bend, such as that of a ReLU, makes any one run closer than the next, in either
engine: of T5's gradients in float16 one such number moves a whole block's by 20 %, PyTorch's in one
run of 17 and the graph's in two of the same 17. A graph that is wrong is so in all.

An output of whole numbers or truth values, such as the index of the largest logit, has no small
differences: at a tie a rounding decides. The same runs tell where ties are, and there alone,
between what PyTorch makes of one rounding and of another, may the graph's differ.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from ortrain.errors import CheckFailed, listing
from ortrain.pytorch.autocast import without_autocast
from ortrain.pytorch.layout import may_be_channels_last, nestings, order_of
from ortrain.pytorch.modes import TorchDispatchMode
from ortrain.step.digest import Digest
from ortrain.step.evidence import Certificate, Evidence


@dataclass(frozen=True)
class Tolerance:
    """How close a graph has to be, root mean square, relative to the values.

    Attributes:
        close: difference from PyTorch that passes without a doubt.
        slack: beyond that, so many times PyTorch's own distance from the truth the graph may be
            away. A factor of two comes from estimating both distances from few projections.
        least: what counts as equal to the truth in any case.
        loose: difference from PyTorch that passes where there is no truth.
        directions: of the projections.
        roundings: runs of both on tensors rounded otherwise, before the graph is refused: where it
            is further away than PyTorch in most of them, too.
    """

    close: float
    slack: float
    least: float
    loose: float
    directions: int = 4
    roundings: int = 0


class Compared(Protocol):
    """A call that both engines run aside."""

    @property
    def precision(self) -> torch.dtype:
        """The narrowest dtype that is computed in; float32 where it is wider."""
        ...

    def given(self) -> Iterable[torch.Tensor]:
        """Parameters and arguments."""
        ...

    def typical(self) -> float:
        """The median root mean square of what is given."""
        ...

    def eager(self, dtype: torch.dtype | None = None, rounding: int = 0) -> Evidence:
        """What PyTorch makes of it, in another dtype, or with what is given rounded otherwise."""
        ...


NARROW = (torch.float16, torch.bfloat16)
# By what a module computes in. Of what is float64 itself there is no other truth; it may have parts
# in float32, by which eager is further away.
_NARROW = Tolerance(
    close=1e-4, slack=2.0, least=1e-5, loose=1e-3, directions=32, roundings=4
)  # fmt: skip
TOLERANCES = {
    torch.float64: Tolerance(close=1e-9, slack=6.0, least=1e-9, loose=1e-9, roundings=4),
    torch.float32: Tolerance(close=1e-4, slack=6.0, least=1e-5, loose=1e-3, roundings=4),
    torch.float16: _NARROW,
    torch.bfloat16: _NARROW,
}
# A gradient that is zero but for roundings, such as that of a key's bias, has no digits of its own:
# it may differ by roundings of the others.
FLOOR = 1e-3
# What is zero but for roundings, such as the mean of a normalized tensor, has no digits at all: in
# float64 and in both engines it is below so many roundings of the typical parameter or input.
NOISE = 16
# Of so few numbers the distance is a matter of luck: the graph may be so many times as far. So it
# is where terms have cancelled out to less than the floor, as in the gradient of a key's bias, zero
# in truth: what is left are a few roundings of the others, alike in all elements.
FEW, LUCK = 16, 3.0
# Of so many elements at ties one may be elsewhere in all runs of the graph, by bad luck: with six
# values of PyTorch's and five of the graph's that is one in 2000, if both round alike.
TIES = 16


def tolerance_of(dtype: torch.dtype, precision: torch.dtype) -> Tolerance:
    """The tolerance of a tensor of a dtype, where a module computes in a precision."""
    if precision in NARROW:
        return TOLERANCES[precision]
    return TOLERANCES.get(dtype, TOLERANCES[torch.float32])


def compare(
    eager: Evidence, graph: Evidence, trial: Compared, rounded: Callable[[int], Evidence]
) -> Certificate:
    """The certificate of two engines' evidence, with what does not agree.

    Args:
        eager: of the module.
        graph: of the graph.
        trial: runs the module in a wider dtype, where that is needed to decide.
        rounded: runs the graph on tensors that are rounded in the way of a number.
    """
    faults = [f"{name} receives a gradient that the graph does not know" for name in eager.strays]
    faults += eager.otherwise
    if list(eager.outputs) != list(graph.outputs):
        faults.append(f"the outputs are {_names(eager)}, not {_names(graph)}")
        return Certificate(False, {}, {}, {}, tuple(faults))
    for name, (_, requires) in eager.outputs.items():
        if requires and not graph.outputs[name][1]:
            faults.append(f"{name} requires a gradient in PyTorch only")
        elif not requires and graph.outputs[name][1]:
            faults.append(f"{name} requires a gradient in the graph only")
    rows = _Rows(trial.precision)
    outputs, gradients, buffers = (
        rows.add(kind, eager.tensors(kind), graph.tensors(kind))
        for kind in ("output", "gradient", "buffer")
    )
    faults += rows.faults
    if rows.doubtful:
        differences = {"output": outputs, "gradient": gradients, "buffer": buffers}
        left, typical = rows.doubtful, trial.typical()
        other: list[Evidence] = []

        def excuse(found: list[_Row], truth: Evidence | None) -> list[_Row]:
            still = []
            for row in found:
                if row.is_noise(truth, typical):
                    differences[row.kind][row.name] = 0.0
                elif not row.excused_by(truth, [row.eager]):
                    still.append(row)
            return still

        if trial.precision is torch.float32:
            other.append(trial.eager(rounding=1))
            left = excuse(left, other[0])
        if left:
            truth = _in_truth(trial)
            left = excuse(left, truth)
            left = _not_by_rounding(left, truth, eager, graph, trial, rounded, other)
        faults += [row.fault for row in left]
        ties = [row.name for row in rows.doubtful if row.is_discrete and row not in left]
        outputs.update(dict.fromkeys(ties, 0.0))
    first = next(iter(eager.outputs.values()), None)
    loss = first is not None and len(first[0].shape) == 0
    orders = _orders(eager, graph)
    return Certificate(loss, outputs, gradients, buffers, tuple(faults), orders)


def agrees(one: Evidence, other: Evidence, precision: torch.dtype) -> bool:
    """Whether two runs give the same beyond doubt, so that nothing else needs to decide it.

    Args:
        one: a run.
        other: another run on the same tensors.
        precision: the narrowest dtype that is computed in.
    """
    rows = _Rows(precision)
    for kind in ("output", "gradient", "buffer"):
        rows.add(kind, one.tensors(kind), other.tensors(kind))
    wanting = [{name: wants for name, (_, wants) in run.outputs.items()} for run in (one, other)]
    return not rows.faults and not rows.doubtful and wanting[0] == wanting[1]


def _orders(eager: Evidence, graph: Evidence) -> dict[tuple[str, str], tuple[int, ...]]:
    """The order of eager's axes where a tensor of the graph lacks one of the views of eager's.

    Of images the strides along axes of one count, by which convolutions choose the order of theirs.
    """
    found = {}
    for key in eager.places.keys() & graph.places.keys():
        theirs, ours = eager.places[key], graph.places[key]
        order = tuple(order_of(*theirs))
        images = may_be_channels_last(torch.empty_strided(*theirs, device="meta"))
        turned = images and order != tuple(order_of(*ours))
        if turned or not nestings(*theirs) <= nestings(*ours):
            found[key] = order
    return found


def _not_by_rounding(
    rows: list[_Row],
    truth: Evidence | None,
    eager: Evidence,
    graph: Evidence,
    trial: Compared,
    rounded: Callable[[int], Evidence],
    theirs: list[Evidence],
) -> list[_Row]:
    """Those of some rows that are further away than PyTorch is however its tensors are rounded.

    Both engines run on the same tensors each time. The graph is further away on the call's own, and
    on most of the others. Without a truth, PyTorch's run of the call is in its place. What PyTorch
    has made of the first roundings already is in ``theirs``.
    """
    exact = truth or eager
    never = [row for row in rows if not row.is_comparable and not row.is_discrete]
    discrete = [row for row in rows if row.is_discrete]
    rows = [row for row in rows if row.is_comparable]
    ours: list[Evidence] = []
    count = TOLERANCES[trial.precision].roundings
    for number in range(1, count + 1):
        if not rows and not discrete:
            break
        if len(theirs) < number:
            theirs.append(trial.eager(rounding=number))
        with contextlib.suppress(CheckFailed):  # whose branch another rounding takes
            ours.append(rounded(number))
        left = []
        for row in rows:
            others = [row.eager, *row.of(theirs)]
            near = sum(replace(row, graph=run).excused_by(exact, others) for run in row.of(ours))
            if not row.excused_by(exact, others) and 2 * near < count:
                left.append(row)
        rows = left
    wide = [] if truth is None else [truth]
    wrong = [row for row in discrete if not row.is_of_ties([eager, *theirs, *wide], [graph, *ours])]
    return never + rows + wrong


@dataclass(frozen=True)
class _Row:
    """One tensor of both engines."""

    kind: str
    name: str
    eager: Digest
    graph: Digest
    difference: float
    scale: float
    precision: torch.dtype
    cancelled: bool = False

    @property
    def tolerance(self) -> Tolerance:
        return tolerance_of(self.eager.dtype, self.precision)

    @property
    def is_comparable(self) -> bool:
        """Whether distances say anything: both are floating, finite in the same places."""
        return self.eager.dtype.is_floating_point and self.eager.alike(self.graph)

    @property
    def is_discrete(self) -> bool:
        """Whether it is an output of whole numbers or truth values, of one shape and dtype."""
        discrete = not (self.eager.dtype.is_floating_point or self.eager.dtype.is_complex)
        alike = (self.eager.shape, self.eager.dtype) == (self.graph.shape, self.graph.dtype)
        return self.kind == "output" and discrete and alike

    @property
    def fault(self) -> str:
        label = f"{self.kind} {self.name}"
        if self.eager.shape != self.graph.shape:
            return f"{label} has shape {[*self.eager.shape]}, not {[*self.graph.shape]}"
        if self.eager.dtype != self.graph.dtype:
            return f"{label} is {self.eager.dtype}, not {self.graph.dtype}"
        if self.eager.special != self.graph.special:
            return f"{label} has NaN or infinities in other places"
        return f"{label} differs by {self.difference:.1e}"

    def of(self, runs: list[Evidence]) -> list[Digest]:
        """This tensor in other runs, where it is there."""
        found = [run.tensors(self.kind).get(self.name) for run in runs]
        return [digest for digest in found if digest is not None]

    def is_of_ties(self, eager: list[Evidence], graph: list[Evidence]) -> bool:
        """Whether discrete elements differ only where PyTorch's own do, by roundings.

        Args:
            eager: runs in PyTorch, on the call's own tensors and on some that are rounded.
            graph: runs of the graph.
        """
        theirs, ours = (
            [
                run.discrete[self.name]
                for run in runs
                if self.name in run.discrete and run.discrete[self.name].shape == self.eager.shape
            ]
            for runs in (eager, graph)
        )
        values = torch.stack(theirs).to(torch.int64)
        least, most = values.amin(0), values.amax(0)
        ties = int((least != most).sum())
        if values[0].numel() >= FEW and 2 * ties > values[0].numel():
            return False  # too little is left that is compared
        wrong = [(tensor < least) | (tensor > most) for tensor in ours]
        return int(torch.stack(wrong).all(0).sum()) <= ties // TIES

    def is_noise(self, truth: Evidence | None, typical: float) -> bool:
        """Whether it is zero but for roundings: nothing above the noise, in the truth neither."""
        rounding = torch.float64 if self.eager.dtype == torch.float64 else torch.float32
        noise = NOISE * torch.finfo(rounding).eps * typical
        exact = truth.tensors(self.kind).get(self.name) if truth is not None else None
        return (
            exact is not None
            and self.eager.alike(self.graph)
            and exact.special == self.eager.special
            and max(exact.scale, self.eager.scale, self.graph.scale) <= noise
        )

    def excused_by(self, truth: Evidence | None, eager: list[Digest]) -> bool:
        """Whether the graph is about as close to the truth as PyTorch is.

        Args:
            truth: the run in a wider dtype; None where there is none.
            eager: one run in PyTorch or several, of which the furthest counts.
        """
        tolerance = self.tolerance
        if not self.is_comparable:
            return False
        exact = truth.tensors(self.kind).get(self.name) if truth is not None else None
        if exact is None or exact.shape != self.eager.shape or exact.special != self.eager.special:
            return self.difference <= tolerance.loose
        least = tolerance.least
        if self.cancelled and self.precision in NARROW:  # half a rounding of the floor
            least = torch.finfo(self.precision).eps / 2
        own = max(exact.distance(run) for run in eager)
        few = self.precision in NARROW and self.eager.shape.numel() < FEW
        slack = tolerance.slack * (LUCK if few or self.cancelled else 1.0)
        return exact.distance(self.graph) <= max(slack * own, least * self.scale)


class _Rows:
    """Sorts pairs of tensors into those that agree, that do not, and that are in doubt."""

    def __init__(self, precision: torch.dtype) -> None:
        self.precision = precision
        self.faults: list[str] = []
        self.doubtful: list[_Row] = []

    def add(
        self, kind: str, eager: Mapping[str, Digest | None], graph: Mapping[str, Digest | None]
    ) -> dict[str, float]:
        known = {name: d for name, d in eager.items() if d is not None}
        other = {name: d for name, d in graph.items() if d is not None}
        for name in [*eager, *(n for n in graph if n not in eager)]:
            if (name in known) != (name in other):
                where = "PyTorch" if name in known else "the graph"
                self.faults.append(f"{kind} of {name} is there in {where} only")
        floats = [d.scale for d in known.values() if d.dtype.is_floating_point]
        of_all = FLOOR * max(floats, default=0.0) if kind == "gradient" else 0.0
        differences: dict[str, float] = {}
        for name in known.keys() & other.keys():
            mine, theirs = known[name], other[name]
            floor = FLOOR * _deviation(name, known) if kind == "buffer" else of_all
            scale = max(mine.scale, floor)
            apart = mine.distance(theirs) if mine.alike(theirs) else math.inf
            difference = apart / scale if scale else (math.inf if apart else 0.0)
            differences[name] = difference
            close = tolerance_of(mine.dtype, self.precision).close
            if not difference <= (close if mine.dtype.is_floating_point else 0.0):
                cancelled = max(mine.scale, theirs.scale) < floor
                self.doubtful.append(
                    _Row(kind, name, mine, theirs, difference, scale, self.precision, cancelled)
                )
        return differences


def _deviation(name: str, buffers: Mapping[str, Digest]) -> float:
    """Of what a buffer is the running mean of; 0 where it is none.

    A mean near zero has the digits of that: SwiftFormer's of 2e-5 beside a variance of 1 differ by
    2e-8 in two engines.
    """
    beside = buffers.get(name.removesuffix("mean") + "var") if name.endswith("mean") else None
    return 0.0 if beside is None else math.sqrt(beside.scale)


def _in_truth(trial: Compared) -> Evidence | None:
    """What the module makes of it in a wider dtype; None where it cannot compute in that.

    Where it computes in 16 bits on the CPU that is float32, whose roundings are none beside theirs;
    but not where autocast is on inside of it, which leaves nothing alone but float64.
    """
    tensors = [*trial.given()]
    plain = all(t.device.type == "cpu" and t.dtype != torch.float64 for t in tensors)
    if plain and trial.precision in NARROW:
        with _Narrow() as narrow:
            truth = _wider(trial, torch.float32)
        if truth is not None and not narrow.seen:
            return truth
    return _wider(trial, torch.float64)


def _wider(trial: Compared, dtype: torch.dtype) -> Evidence | None:
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with without_autocast():
            return trial.eager(dtype)
    except Exception:
        return None
    finally:
        torch.set_default_dtype(default)


class _Narrow(TorchDispatchMode):
    """Sees whether anything is computed in 16 bits."""

    seen = False

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        made = result if isinstance(result, (tuple, list)) else (result,)
        self.seen |= any(t.dtype in NARROW for t in made if isinstance(t, torch.Tensor))
        return result


def _names(evidence: Evidence) -> str:
    return listing(list(evidence.outputs)) or "none"

"""Runs a script eagerly and with ORTModule, and compares what each of its actions leaves.

Of what is compared with, public names alone are asked: what replaces the way to a graph is judged
by the same programs.
"""

from __future__ import annotations

import dataclasses
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.utils.checkpoint import CheckpointError

from ortrain import ORTModule
from tests.hunt.fronts import Counts, Front
from tests.hunt.modules import Batch, Subject
from tests.module.agreement import DRIFTED, ROUNDING, SAME

# Of float64, relative to the tensor's largest value: the certificate's own bound.
DOUBLE = 1e-9
# Of the largest gradient, what roundings make of one that is zero.
DOUBLE_ROUNDING = 1e-11
SMALL = 1e-1
# What numbers are compared with that are smaller.
SMALLEST = 1e-3
# By how many roundings weights are moved, to see what the script makes of that, and which part of a
# difference that explains.
MOVED, EXPLAINED = 4.0, 1 / 30
# In how many ways, since a weight that is stored in bfloat16 seldom ends up as another one.
WAYS = 8
# Of bfloat16, in the outputs of a small module.
REDUCED = 3e-2

Script = Callable[["Run"], None]
Wrap = Callable[[nn.Module], nn.Module]
Look = tuple[str, str, Any]
"""The action, what is looked at, and what is there."""


class Refused(Exception):
    """PyTorch finds that what a checkpoint has saved lies otherwise at its repetition.

    A graph saves other tensors, and PyTorch compares no more than those that are saved. Nor has
    PyTorch gradients of chosen inputs through a reentrant checkpoint, which a graph has.
    """


class Difference(AssertionError):
    """What an action leaves is not what it leaves in PyTorch.

    Attributes:
        place: in the record of what was seen.
        apart: of numbers that differ, relative to the largest of their tensor, or to ``SMALLEST``.
        magnified: whether PyTorch's own numbers differ as much where its weights are some roundings
            away.
        inherited: whether it is there as well with nothing of ours on the way.
    """

    place = 0
    apart: float | None = None
    magnified = False
    inherited = False


@dataclasses.dataclass
class Seen:
    """A tensor at the time when it was looked at.

    Attributes:
        value: a copy.
        wants: whether it requires a gradient, and whether it is a leaf.
        same: the first place of the same look that holds the very tensor.
        floor: of the difference, in units of the value.
        bound: of the difference, relative to the largest value.
        order: of axes of more than one in memory; of outputs that are looked at closely.
        memory: the first place of the same look that holds a tensor of the same memory; likewise.
    """

    value: Tensor
    wants: tuple[bool, bool]
    same: int
    floor: float
    bound: float
    order: tuple[int, ...] = ()
    memory: int = 0

    def differs(self, other: Seen) -> str:
        """In what another tensor differs from this one, which is eager's."""
        mine, theirs = self.value, other.value
        if theirs.dtype != mine.dtype:
            return f"{theirs.dtype} where eager has {mine.dtype}"
        if theirs.shape != mine.shape:
            return f"shape {tuple(theirs.shape)} where eager has {tuple(mine.shape)}"
        if self.wants != other.wants:
            return f"(requires_grad, is_leaf) {other.wants} where eager has {self.wants}"
        if self.same != other.same:
            return f"is place {other.same} where in eager it is place {self.same}"
        if self.order != other.order:
            return f"order of axes in memory {other.order} where eager has {self.order}"
        if not mine.is_floating_point() or not mine.numel():
            return "" if torch.equal(mine, theirs) else f"{theirs} where eager has {mine}"
        a, b = mine.double(), theirs.double()
        if not torch.equal(a.isnan(), b.isnan()):
            return "NaN elsewhere than in eager"
        finite = a.isfinite() & b.isfinite()
        if not torch.equal(a[~finite & ~a.isnan()], b[~finite & ~b.isnan()]):
            return "infinite elsewhere than in eager"
        if not finite.any():
            return ""
        error, largest = float((a - b)[finite].abs().max()), float(a[finite].abs().max())
        if error <= max(self.bound * largest, self.floor):
            return ""
        return f"{error:.3g} from eager, whose largest value is {largest:.3g}"


class Stale:
    """A backward that was an error, since a tensor that it reads was changed in place."""


class Run:
    """A script's module, optimizer and what else it holds.

    Args:
        subject: makes the module, and batches.
        wrap: ``ORTModule`` with options, or nothing.
        dtype: of the module.
        seed: of torch's generator.
        closely: whether strides and shared memory of outputs are remembered.
        moved: which of the ways in which the weights are some roundings away; 0 for none.
    """

    def __init__(
        self,
        subject: Subject,
        wrap: Wrap,
        dtype: torch.dtype,
        seed: int,
        closely: bool = False,
        moved: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.seed, self.batches = seed, 0
        self.subject, self.wrap, self.closely = subject, wrap, closely
        self.dtype = self.born = dtype
        self.record: list[tuple[str, str, Any]] = []
        self.now, self.trained = "", False
        self.pending: list[Tensor] = []
        self.handles: list[Any] = []
        self.removed: Any = None
        self.traces: dict[str, str] = {}
        module = self.subject.make().to(dtype)
        if moved:
            _move(module, moved)
        self.model = wrap(module)
        self.fresh_optimizer()

    # -- what a script asks for ------------------------------------------------------------------

    def batch(self, n: int, length: int, dtype: torch.dtype | None = None) -> Batch:
        """Arguments of ``n`` rows, whatever was drawn before."""
        self.batches += 1
        with torch.random.fork_rng([]):
            torch.manual_seed(1000 * self.seed + self.batches)
            return self.subject.batch(n, length, dtype or self.dtype)

    def fresh_optimizer(self) -> None:
        """Plain descent on all parameters that the model has now."""
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def loss(self, out: Any) -> Tensor:
        """A number of all outputs that may have gradients, which is not linear in them."""
        floats = [t for t in tensors(out) if t.is_floating_point()]
        total = torch.zeros((), dtype=torch.float64)
        for place, tensor in enumerate(floats):
            total = total + (tensor.double().square().sum() * 0.05 + tensor.sum() * 0.02) / (
                place + 1
            )
        return total

    def inner(self) -> nn.Module:
        """The module itself."""
        return unwrapped(self.model)

    def unwrap(self, module: nn.Module) -> nn.Module:
        """A module without its wrapper."""
        return unwrapped(module)

    def tensors(self, out: Any) -> list[Tensor]:
        """The tensors of an output."""
        return tensors(out)

    def spread(self, tensor: Tensor) -> Tensor:
        """The same values with gaps in memory, and the last two axes the other way round."""
        wide = tensor.repeat_interleave(2, -1)[..., ::2]
        return wide.transpose(-1, -2).contiguous().transpose(-1, -2) if tensor.dim() > 1 else wide

    def parameter(self, which: int) -> nn.Parameter:
        """One of the parameters."""
        found = list(self.inner().parameters())
        return found[which % len(found)]

    def part(self, which: int) -> nn.Module:
        """The module or one below it."""
        found = [self.inner(), *(child for _, _, child in seats(self.inner()))]
        return found[which % len(found)]

    def place(self, which: int) -> tuple[nn.Module, str]:
        """A parameter's module, and its name there."""
        found = [(owner, name) for owner, name, _ in self.places_of(self.model)]
        return found[which % len(found)]

    def seat(self, which: int) -> tuple[nn.Module, str]:
        """A module's parent, and its name there."""
        found = [(owner, name) for owner, name, _ in seats(self.inner())]
        return found[which % len(found)]

    def places_of(self, model: nn.Module) -> list[tuple[nn.Module, str, str]]:
        """All parameters: their module, their name there, and the whole name."""
        root = unwrapped(model)
        parts = [(root, ""), *((part, f"{path}.") for path, part in named(root))]
        return [
            (part, name, f"{path}{name}")
            for part, path in parts
            for name, parameter in part._parameters.items()
            if parameter is not None
        ]

    def linears(self) -> list[tuple[nn.Module, str, nn.Linear]]:
        """The linear layers, with their parents and their names there."""
        return [(o, n, c) for o, n, c in seats(self.inner()) if isinstance(c, nn.Linear)]

    def draws(self) -> bool:
        """Whether the module draws numbers, which a graph does in another way."""
        return any(
            isinstance(part, nn.RReLU)
            or (isinstance(part, nn.modules.dropout._DropoutNd) and bool(part.p))
            for part in (*self.inner().modules(), *(part for _, _, part in seats(self.inner())))
        )

    # -- what is remembered ----------------------------------------------------------------------

    def see(self, value: Any, reduced: bool = False) -> None:
        """Remembers a value: an output, a loss, a list of keys."""
        kept: list[Tensor] = []
        with torch.no_grad(), torch.inference_mode(False):
            seen = self._plain(value, kept, self._floor(), reduced, self._names(), self.closely)
            self._keep("result", seen)

    def backward(self, loss: Tensor) -> None:
        """The backward of what may have been changed in place since the forward.

        "An in-place change, between forward and backward, of a tensor that the backward reads" is
        an error, and a graph's backward may read fewer tensors than PyTorch's: where PyTorch's
        reads what was changed, the graph's gradients are not compared.
        """
        self.model.zero_grad()
        outcome: Any = None
        try:
            loss.backward()
            outcome = self._gradients()
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            self.traces[self.now] = traceback.format_exc()
            outcome = Stale()
        self._keep("backward of what was changed", outcome)
        self.model.zero_grad()

    def look(self) -> None:
        """Remembers parameters, gradients, buffers and modes."""
        with torch.no_grad():
            module, kept = self.inner(), list[Tensor]()
            self._keep("gradients", self._gradients())
            parameters = dict(module.named_parameters(remove_duplicate=False))
            self._keep("parameters", self._plain(parameters, kept, self._floor()))
            self._keep("buffers", self._plain(dict(module.named_buffers()), kept, self._floor()))
            parts = [module, *(part for _, _, part in seats(module))]
            self._keep("modes", [part.training for part in parts])
            if not self.draws():
                self._keep("generator", hash(torch.get_rng_state().numpy().tobytes()))

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """One action; what it raises is remembered too, and the script goes on."""
        self.now = name
        torch.manual_seed(1000 * self.seed - self.batches)
        try:
            yield
        except Exception as error:
            self.traces[name] = traceback.format_exc()
            self._keep("error", error)
            torch.set_grad_enabled(True)
            for parameter in self.inner().parameters():
                parameter.grad = None  # a backward that fails has given some of them
        self.look()

    def _keep(self, what: str, value: Any) -> None:
        self.record.append((self.now, what, value))

    def _gradients(self) -> Any:
        gradients = {n: p.grad for n, p in self.inner().named_parameters()}
        present = [g for g in gradients.values() if g is not None and g.numel()]
        largest = max((float(g.abs().max()) for g in present), default=0.0)
        return self._plain(gradients, [], self._floor(largest))

    def _floor(self, largest: float = 0.0) -> float:
        """What a rounding may be: where all are of zeros, what they were made of is no smaller."""
        rounding = DOUBLE_ROUNDING if self.born == torch.float64 else ROUNDING
        return max(largest, SMALL) * rounding

    def _names(self) -> list[Tensor]:
        return [
            tensor
            for tensor in (*self.inner().parameters(), *self.inner().buffers())
            if not nn.parameter.is_lazy(tensor)
        ]

    def _plain(
        self,
        value: Any,
        kept: list[Tensor],
        floor: float,
        reduced: bool = False,
        first: list[Tensor] | None = None,
        closely: bool = False,
    ) -> Any:
        """A value with its tensors as they are now."""
        if first:
            kept.extend(first)

        def plain(value: Any) -> Any:
            if nn.parameter.is_lazy(value):
                return "not yet made"
            if isinstance(value, Tensor):
                same = next((i for i, t in enumerate(kept) if t is value), len(kept))
                kept.append(value)
                wants = (value.requires_grad, value.is_leaf)
                trained = self.trained or isinstance(value, nn.Parameter)
                bound = DRIFTED if trained else SAME
                if value.dtype == self.born == torch.float64:
                    bound = DOUBLE
                bound = REDUCED if reduced else bound
                seen = Seen(value.detach().clone(), wants, same, floor, bound)
                if closely and value.numel():
                    own = value.untyped_storage().data_ptr()
                    seen.memory = next(
                        i for i, t in enumerate(kept) if t.untyped_storage().data_ptr() == own
                    )
                    axes = [a for a, size in enumerate(value.shape) if size > 1 and value.stride(a)]
                    seen.order = tuple(sorted(axes, key=lambda a: -value.stride(a)))
                return seen
            if isinstance(value, dict):
                return type(value).__name__, {k: plain(v) for k, v in value.items()}
            if isinstance(value, list | tuple):
                return type(value).__name__, [plain(v) for v in value]
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
                return type(value).__name__, {k: plain(v) for k, v in fields.items()}
            return value

        return plain(value)


@torch.no_grad()
def _move(module: nn.Module, way: int) -> None:
    draw = torch.Generator().manual_seed(way - 1)
    for parameter in module.parameters():
        if parameter.is_floating_point() and not nn.parameter.is_lazy(parameter):
            signs = torch.randn(parameter.shape, generator=draw).sign().to(parameter.dtype)
            parameter.mul_(1 + signs * MOVED * torch.finfo(parameter.dtype).eps)


def unwrapped(module: nn.Module) -> nn.Module:
    """A module without its wrapper."""
    return module.module if isinstance(module, ORTModule) else module


def seats(root: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """All modules below one: their parent, their name there, and they themselves."""
    found = []
    for name, child in root._modules.items():
        if child is not None:
            inner = unwrapped(child)
            found += [(root, name, inner), *seats(inner)]
    return found


def named(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules below one, without wrappers, by their paths."""
    for name, child in root._modules.items():
        if child is not None:
            inner = unwrapped(child)
            yield name, inner
            yield from ((f"{name}.{path}", part) for path, part in named(inner))


def tensors(value: Any) -> list[Tensor]:
    """The tensors in an output, in order."""
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, f.name) for f in dataclasses.fields(value)]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in tensors(v)] if isinstance(value, list | tuple) else []


def agree(
    script: Script,
    subject: Subject,
    *,
    dtype: torch.dtype,
    seed: int,
    front: Front,
    closely: bool = False,
) -> Counts:
    """Runs a script on both, and compares all that was seen.

    Args:
        script: its actions.
        subject: makes the module, and batches.
        dtype: of the module.
        seed: of torch's generator.
        front: the way to graphs.
        closely: whether strides and shared memory of outputs are compared as well.

    Returns:
        What became of the calls.

    Raises:
        Difference: at the first action that leaves something else than in PyTorch.
    """
    around = _left_behind()
    eager = Run(subject, lambda module: module, dtype, seed, closely)
    ours = Run(subject, front.wrap, dtype, seed, closely)
    _run(script, eager)
    with front.around():
        _run(script, ours)
    # Under a hook or a setting that is left behind, later scripts of the process would be run in
    # PyTorch, and agree.
    assert (left := _left_behind()) == around, f"a script leaves {left} where {around} was"
    counts = front.counts(ours.model)
    try:
        _compare(eager, ours)
    except Refused:
        return counts
    except Difference as found:
        if found.apart is not None:
            apart = [0.0]
            for way in range(1, WAYS + 1):
                moved = Run(subject, lambda module: module, dtype, seed, closely, moved=way)
                _run(script, moved)
                other = moved.record[found.place : found.place + 1]
                apart += [_apart(eager.record[found.place][2], each[2]) for each in other]
            found.magnified = max(apart) >= found.apart * EXPLAINED
        if (plain := front.plain()) is not None:
            without = Run(subject, plain.wrap, dtype, seed, closely)
            with plain.around():
                _run(script, without)
            found.inherited = _is_there(found, eager, without) or _agrees(without, ours)
        raise
    pairs = zip(_seen(eager.record), _seen(ours.record), strict=False)
    counts.copies = sum(a.memory != b.memory for a, b in pairs)
    return counts


def _is_there(found: Difference, eager: Run, other: Run) -> bool:
    """Whether another run differs from eager at the place where one does."""
    try:
        _compare(eager, other)
    except Difference as own:
        return own.place == found.place
    except Refused:
        pass
    return False


def _agrees(one: Run, other: Run) -> bool:
    try:
        _compare(one, other)
    except (Difference, Refused):
        return False
    return True


def _run(script: Script, run: Run) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(run.seed)
        script(run)


def _apart(a: Any, b: Any) -> float:
    """The largest difference of two values' numbers, relative to the largest of each tensor."""
    worst = 0.0
    for one, other in zip(_seen(a), _seen(b), strict=False):
        if one.value.shape == other.value.shape and one.value.is_floating_point():
            error = (one.value.double() - other.value.double()).abs()
            largest = float(one.value.abs().nan_to_num(0).max()) if one.value.numel() else 0.0
            worst = max(worst, float(error.nan_to_num(0).max()) / max(largest, SMALLEST))
    return worst


def _seen(value: Any) -> Iterator[Seen]:
    if isinstance(value, Seen):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _seen(each)


def _left_behind() -> dict[str, Any]:
    """What of the process a script could have left changed."""
    hooks = [name for name in vars(module_hooks) if name.startswith("_global_")]
    return {
        "hooks": [name for name in hooks if getattr(module_hooks, name)],
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "anomaly": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dtype": torch.get_default_dtype(),
    }


def _compare(eager: Run, ours: Run) -> None:
    for place, (mine, theirs) in enumerate(zip(eager.record, ours.record, strict=False)):
        try:
            _compare_looks(eager, mine, ours, theirs)
        except Difference as found:
            found.place = place
            raise
    assert len(eager.record) == len(ours.record)


def _compare_looks(eager: Run, mine: Look, ours: Run, theirs: Look) -> None:
    (step, what, a), (other, kind, b) = mine, theirs
    if (step, what) != (other, kind):
        which = ours if kind == "error" else eager
        error = b if kind == "error" else a
        raises = kind == "error"
        refuses = isinstance(error, CheckpointError) or "use_reentrant=True" in str(error)
        if refuses and not raises:
            raise Refused
        if raises or what == "error":
            who = "ORTModule raises" if raises else "eager alone raises"
            raise Difference(f"{step}: {who} {error!r}\n{which.traces.get(step, '')}")
        raise Difference(f"{step}: {kind} of {other} where eager has {what}")
    if what == "error":
        if not isinstance(b, type(a)):
            raise Difference(f"{step}: raises {b!r} where eager raises {a!r}\n{ours.traces[step]}")
    elif difference := _differs(a, b):
        found = Difference(f"{step}: {what}{difference}")
        if numbers := re.search(r": (\S+) from eager, whose largest value is (\S+)$", str(found)):
            found.apart = float(numbers[1]) / max(float(numbers[2]), SMALLEST)
        raise found


def _differs(a: Any, b: Any) -> str:
    if isinstance(a, Stale):
        return ""
    if isinstance(b, Stale):
        return ": an error about a change in place where eager has gradients"
    if isinstance(a, Seen) and isinstance(b, Seen):
        difference = a.differs(b)
        return f": {difference}" if difference else ""
    if type(a) is not type(b):
        return f": {b!r} where eager has {a!r}"
    if isinstance(a, dict):
        if list(a) != list(b):
            return f": {list(b)} where eager has {list(a)}"
        return next((f" {k}{d}" for k in a if (d := _differs(a[k], b[k]))), "")
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return f": {len(b)} where eager has {len(a)}"
        pairs = enumerate(zip(a, b, strict=True))
        return next((f" {i}{d}" for i, (x, y) in pairs if (d := _differs(x, y))), "")
    if isinstance(a, float) and a == a and abs(a) != float("inf"):
        return "" if abs(a - b) <= 1e-4 * abs(a) else f": {b} where eager has {a}"
    return "" if a == b or a != a else f": {b!r} where eager has {a!r}"

"""What is known of the calls of a module: states of it, forms of call, captures and their steps.

A :class:`CallForm` is all calls that differ in sizes and values only. It has a capture for every
group of sizes that the module's code treats alike (one, nearly always), a capture has a step for
every set of trainable parameters, and a step may have siblings for other outputs that receive a
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ortrain.capture.export import Captured
from ortrain.capture.returned import Source
from ortrain.errors import CaptureError, CheckFailed, OrtrainError
from ortrain.graph.cost import Multiplications
from ortrain.guards.attributes import Attribute, Moving
from ortrain.guards.call_kinds import Kinds
from ortrain.guards.guard import Guard
from ortrain.guards.handed import Changes
from ortrain.guards.numbers import Numbers, Seen
from ortrain.guards.reads import reads_noted
from ortrain.guards.structure import FlatCall, OutputStructure
from ortrain.passes.tokens import Shown
from ortrain.program import Program, Role
from ortrain.runtime.base import Executor
from ortrain.step.autograd import Step
from ortrain.step.contest import Race
from ortrain.step.evidence import Certificate
from ortrain.step.report import Report, Saving
from ortrain.step.tokens import TokenCounts, Tokens

# Calls in a row at whose values the code goes another way than the graph, until it is captured
# anew, the way of the next call; how often that is done; and how many such calls there must be, at
# a quarter of all, to leave the form to PyTorch.
STRAYS_IN_A_ROW, MOST_WAYS, ENOUGH_STRAYS = 3, 4, 8

# Why a form of call runs in PyTorch whose gradients were asked for with create_graph=True.
DIFFERENTIATED_AGAIN = "its gradients are differentiated again, which PyTorch does"

Sizes = tuple[torch.Size, ...]
"""The shapes of a call's tensors."""

Variant = tuple[str, tuple[bool, ...], bool]
"""What selects among the steps of a capture: the engine, what is trainable, and whether tokens that
nobody reads are left out."""


@dataclass
class StepVariants:
    """The steps of one capture that differ in the outputs which receive a gradient.

    Attributes:
        step: the one that the next forward runs.
        by_outputs: all that were built.
        executor: that has compiled them.
        sizes: that they were planned for.
        certificate: of their comparison with the module; None where there was none.
        misses: backwards that came for other outputs, since the last change of ``step``.
        patience: how many it takes to change ``step``; doubles each time, so that a loop which
            alternates settles.
    """

    step: Step
    by_outputs: dict[tuple[str, ...], Step]
    executor: Executor
    sizes: dict[str, int]
    certificate: Certificate | None = None
    misses: int = 0
    patience: int = 1


@dataclass
class CompiledCapture:
    """One capture, ready to run.

    Attributes:
        captured: the capture.
        program: of it, as steps that compute all tokens are built of it.
        hidden: positions of its outputs that are zeros there, since nobody reads them.
        order: for each tensor of the capture its place among the call's tensors.
        positions: for each user input of the program its place among the call's tensors.
        structure: rebuilds the module's output.
        axes: symbolic dimensions, each with a tensor of the call and its axis that has this size.
        cost: of the program.
        tokens: leaves out those that nobody reads; None where all are read.
        counts: of tokens whose densities are printed; None where they are not.
        variants: steps by engine, by what is trainable, and by whether tokens are left out.
        ones: which patterns of sizes of 1 were compared with the module, and whether they agree.
        threads: of the steps.
        planned: the cost of the largest call that a step was built for.
        strays: calls at whose values the code went another way than the graph.
        in_a_row: of them, the last without a call of the graph between.
        since: calls of the graph at the first stray, and at the last one.
        returned: the outputs that are no new contiguous tensors; arguments by their places in the
            call.
        changes: what a call changes in the containers that it is given; None where there is none.
        kinds: of calls, of each of which the first is compared; None where all are alike.
        orders: of gradients of inputs, by name: their axes from the outermost in memory to the
            innermost, where a comparison has found eager's to lie so and not in their order.
    """

    captured: Captured
    program: Program
    hidden: tuple[int, ...]
    order: list[int]
    positions: list[int]
    structure: OutputStructure
    axes: list[tuple[str, int, int]]
    cost: Multiplications
    tokens: Tokens | None = None
    counts: TokenCounts | None = None
    variants: dict[Variant, StepVariants] = field(default_factory=dict)
    ones: dict[tuple[Any, ...], bool] = field(default_factory=dict)
    threads: int = 0
    planned: int = 0
    strays: int = 0
    in_a_row: int = 0
    since: tuple[int, int] = (0, 0)
    returned: dict[int, Source] = field(default_factory=dict)
    changes: Changes | None = None
    kinds: Kinds | None = None
    orders: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def agrees(self, flat: FlatCall, certificate: Certificate) -> None:
        """Notes a comparison with the module, and how what PyTorch makes lies in memory."""
        if certificate.faults:
            return
        if self.kinds is not None:
            self.kinds.compared.add(self.kinds.of(flat.tensors))
        places = self._places() if certificate.orders else {}
        for (kind, name), axes in certificate.orders.items():
            if kind == "gradient":
                self.orders[name] = axes
            else:
                self.returned[places[name]] = Source("stored", axes=axes)

    def _places(self) -> dict[str, int]:
        """Of each tensor of the module's output its place among the program's outputs."""
        outputs = self.captured.program.outputs(Role.USER_OUTPUT, Role.LOSS)
        stand_ins = [torch.zeros(()) for _ in outputs]
        found, structure = OutputStructure.from_output(self.structure.rebuild(stand_ins))
        known = {id(tensor): place for place, tensor in enumerate(stand_ins)}
        return {name: known[id(t)] for name, t in zip(structure.names, found, strict=True)}

    def sizes(self, flat: FlatCall) -> dict[str, int]:
        """The value that each symbolic dimension has in a call."""
        return {symbol: flat.tensors[place].shape[axis] for symbol, place, axis in self.axes}

    def densities(self, flat: FlatCall) -> dict[str, float]:
        """Of a call's sets of tokens, by what they are in words."""
        assert self.counts is not None
        counts = self.counts([flat.tensors[i] for i in self.positions])
        return self.counts.densities(counts, self.sizes(flat))

    def outgrown(self, flat: FlatCall) -> bool:
        """Whether a call is larger than those that the steps were built for."""
        return bool(self.variants) and self.cost(self.sizes(flat)) > self.planned

    def saving(self, flat: FlatCall) -> Saving | None:
        """What is saved of a call by leaving out tokens that nobody reads.

        None where they are not counted: all are read, or the call is too small.
        """
        if self.tokens is None:
            return None
        users = [flat.tensors[i] for i in self.positions]
        return self.tokens.saving(users, self.sizes(flat))

    def stray(self, calls: int) -> bool:
        """Notes a call that went another way; whether that is too many in all.

        Args:
            calls: of the graph until now.
        """
        first, last = self.since if self.strays else (calls, calls)
        self.in_a_row = self.in_a_row + 1 if calls == last else 1
        self.strays += 1
        self.since = first, calls
        return self.strays >= max(ENOUGH_STRAYS, (calls - first) / 3)


@dataclass
class CallForm:
    """All that is known of one form of call in one state of the module.

    Attributes:
        grad: whether gradients are enabled.
        engine: that runs its graphs.
        report: that its calls are counted in.
        reason: why calls of this form run in PyTorch; empty where they do not.
        lost: whether that is because eager is faster.
        race: the contest with eager, until it is decided.
        served: captures.
        by_sizes: the capture that serves calls of these sizes.
        refused: sizes for which there is no capture, and why; there is one for others.
        recover: notes a backward that failed, and says whether PyTorch may answer it.
        seen: of the calls that differ from these in numbers only; None where there are no numbers.
        ways: how often a capture was dropped because the code went another way.
        shown: what is read of its outputs.
        asked: whether it was asked if a graph can be made at all, before one is.
    """

    grad: bool
    report: Report
    engine: str = "onnxruntime"
    reason: str = ""
    lost: bool = False
    race: Race | None = None
    served: list[CompiledCapture] = field(default_factory=list)
    by_sizes: dict[Sizes, CompiledCapture] = field(default_factory=dict)
    refused: dict[Sizes, str] = field(default_factory=dict)
    recover: Callable[[CallForm, OrtrainError, FlatCall], bool] = field(default=lambda *_: False)
    seen: Seen | None = None
    ways: int = 0
    shown: Shown = "all"
    asked: bool = False

    def went_astray(self, served: CompiledCapture | None, error: CheckFailed) -> None:
        """Learns from a call at whose values the code went another way than the graph.

        Args:
            served: the capture; None where it was about to be compared with the module.
            error: tells where it went.
        """
        served = served or self.served[-1]
        self.report.astray += 1
        if served.stray(self.report.graph_calls):
            self.reason = str(too_many_ways(error))
        elif served.in_a_row == STRAYS_IN_A_ROW and served.captured.branches:
            self.ways += 1
            self.drop()
            if self.ways == MOST_WAYS:
                self.reason = str(too_many_ways(error))

    def differentiated_again(self) -> None:
        """Its next calls run in PyTorch: a graph has first derivatives only."""
        self.reason = DIFFERENTIATED_AGAIN

    def recovers(self, error: OrtrainError, call: FlatCall) -> bool:
        """Whether PyTorch may answer a backward that failed in the graph; it is counted then."""
        return self.recover(self, error, call)

    def retire(self) -> None:
        """Drops what only a graph needs; not while a backward runs, which has its hooks."""
        if self.race is not None:
            self.race.close()
            self.race = None
        self.drop()

    def forget_other_engines(self) -> None:
        """Keeps the steps of its engine alone."""
        for served in self.served:
            for key in [key for key in served.variants if key[0] != self.engine]:
                del served.variants[key]

    def drop(self) -> None:
        """Forgets all captures."""
        self.served, self.by_sizes, self.refused = [], {}, {}


def too_many_ways(last: CheckFailed) -> CaptureError:
    """Why a form of call runs in PyTorch whose values are none for a graph, too often to pay."""
    return CaptureError(
        "the graph does not hold for the values of too many calls",
        where=last.where,
        because=last.because,
        help="compute both ways and choose with torch.where, or leave this to eager",
    )


@dataclass(eq=False)
class ModuleState:
    """A state of the module, with what was captured in it.

    Attributes:
        guard: tells whether the module is still in it.
        tensors: parameters and buffers by name.
        forms: of calls, by their structure and the ambient modes.
        attributes: numbers that are inputs.
        live: sub-modules that stay PyTorch's in its graphs.
        unread: attributes that are not watched, since no code has read them.
        read: attributes that were not watched at first, until code did.
        kinds: classes of arguments, whose code counts.
        numbers: which numbers among the arguments are inputs.
        moving: adds the attributes to a call; None where there are none.
    """

    guard: Guard
    tensors: dict[str, torch.Tensor]
    forms: dict[Any, CallForm] = field(default_factory=dict)
    attributes: frozenset[Attribute] = frozenset()
    live: tuple[nn.Module, ...] = ()
    unread: frozenset[Attribute] = frozenset()
    read: set[Attribute] = field(default_factory=set)
    kinds: set[type] = field(default_factory=set)
    numbers: Numbers = field(init=False)
    moving: Moving | None = field(init=False)

    def __post_init__(self) -> None:
        self.numbers = Numbers(self.tensors)
        self.moving = Moving(self.attributes, self.numbers.wide) if self.attributes else None

    def settle(self, module: nn.Module, form: CallForm) -> None:
        """Takes what a first call has changed in the module as part of this state.

        Its code may fill in what it finds missing: transformers writes `config.problem_type`.
        Captures made before that are dropped, since they may depend on it; where they are of the
        same form, the change counts as one of state.

        Args:
            module: the module.
            form: of the call that was just traced, or run in PyTorch.
        """
        if form.served or self.guard.changed() is None:
            return
        for other in self.forms.values():
            other.drop()
        # In place, since others hold the table: its code may have assigned buffers anew, too.
        self.tensors.clear()
        self.tensors.update(_tensors_of(module))
        self._guard(module)

    def leave(self, module: nn.Module, live: tuple[nn.Module, ...]) -> None:
        """Takes it that some sub-modules stay PyTorch's: what they hold is read at each call.

        Args:
            module: the module.
            live: these sub-modules.
        """
        if live != self.live:
            self.live = live
            self._guard(module)

    def know(self, module: nn.Module, kinds: set[type]) -> None:
        """Takes it that a capture depends on the code of some classes of arguments.

        Args:
            module: the module.
            kinds: the classes.
        """
        if not kinds <= self.kinds:
            self.kinds |= kinds
            self._guard(module)

    @contextmanager
    def reads_noted(self, module: nn.Module) -> Iterator[None]:
        """What is read inside of the attributes that are not watched, is watched from now on.

        Args:
            module: the module, whose code is traced.
        """
        if not self.unread:
            yield
            return
        read: set[Attribute] = set()
        try:
            with reads_noted(self.unread) as read:
                yield
        finally:
            if read:
                self.read |= read
                self.unread = self.unread.difference(read)
                self._guard(module)

    def _guard(self, module: nn.Module) -> None:
        kinds = tuple(self.kinds)
        self.guard = Guard(module, self.attributes, self.live, self.unread, kinds)

    def retire(self) -> None:
        """Drops all that was captured in it."""
        for form in self.forms.values():
            form.retire()

    @classmethod
    def of(
        cls,
        module: nn.Module,
        attributes: frozenset[Attribute] = frozenset(),
        live: tuple[nn.Module, ...] = (),
        unread: frozenset[Attribute] = frozenset(),
    ) -> ModuleState:
        """The state that the module is in now.

        Args:
            module: the module.
            attributes: of it that are inputs of its graphs.
            live: sub-modules that stay PyTorch's in these.
            unread: attributes that no capture has read.
        """
        tensors = _tensors_of(module)
        guard = Guard(module, attributes, live, unread)
        if unread and guard.reads_past:
            unread = frozenset()
            guard = Guard(module, attributes, live)
        return cls(guard, tensors, attributes=attributes, live=live, unread=unread)


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers and parameters by name."""
    return {**dict(module.named_buffers()), **dict(module.named_parameters())}

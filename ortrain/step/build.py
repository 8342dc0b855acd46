"""From a captured program to a compiled step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import onnx_ir as ir

from ortrain.autodiff.budget import within
from ortrain.autodiff.engine import differentiate, reachable
from ortrain.autodiff.held import saved_bytes
from ortrain.autodiff.partition import partition
from ortrain.autodiff.registry import foreign_rules
from ortrain.cache import Cache
from ortrain.config import Budget
from ortrain.errors import CheckFailed, ExecutionError, listing
from ortrain.graph import shapes
from ortrain.graph.walk import dependencies
from ortrain.ops.base import expand
from ortrain.ops.custom_gradient import is_custom_gradient
from ortrain.passes import PIPELINES, rewrite
from ortrain.passes.clean import clean
from ortrain.program import (
    Check,
    Program,
    Role,
    checks_of,
    is_checkpointed,
    role_of,
    set_role,
    target_of,
    width_of,
)
from ortrain.runtime.base import Compiled, Exchange, Executor
from ortrain.step.links import Links, links

# Above this much kept between forward and backward, the backward runs in pieces, so that what the
# first pieces used is freed while the last ones make the gradients. A run costs about 10 µs.
PIECE_BYTES = 32 << 20
MOST_PIECES = 6
# Where gradients are exchanged between processes, a piece makes about as many bytes of them as
# DistributedDataParallel puts into one message, so that one travels while the next is made.
MESSAGE_BYTES = 25 << 20


@dataclass(frozen=True)
class Source:
    """Where an input of a backward piece comes from.

    Attributes:
        kind: ``feed`` (a feed of the forward), ``fetch`` (an output of it), ``upstream`` (a
            gradient of a user output), ``carry`` (an output of an earlier piece).
        index: position there; of all carried values in the order in which they are made.
    """

    kind: str
    index: int


@dataclass(frozen=True)
class Piece:
    """One backward program.

    Attributes:
        compiled: what runs it.
        takes: where its inputs come from: feeds and fetches, then upstream, then carried ones.
        gives: the positions of its outputs: ``(position, index of the gradient)``.
        carries: positions of its outputs that later pieces take.
        frees: of all carried values those that no later piece takes.
    """

    compiled: Compiled
    takes: tuple[Source, ...]
    gives: tuple[tuple[int, int], ...]
    carries: tuple[int, ...]
    frees: tuple[int, ...] = ()

    @cached_property
    def kept(self) -> tuple[tuple[bool, int], ...]:
        """What it takes of the forward, first: whether it is a fetch, or else a feed, and which."""
        known = [source for source in self.takes if source.kind in ("fetch", "feed")]
        return tuple((source.kind == "fetch", source.index) for source in known)

    @cached_property
    def given(self) -> tuple[tuple[bool, int], ...]:
        """What it takes behind that: whether it is upstream, or else carried, and which."""
        rest = self.takes[len(self.kept) :]
        return tuple((source.kind == "upstream", source.index) for source in rest)


@dataclass(frozen=True)
class Plan:
    """A compiled step.

    Attributes:
        forward: runs the forward program.
        exchange: of tensors with the programs.
        feeds: its inputs, as (role, name).
        outputs: how many of its outputs the user gets; they come first.
        reachable: which of them depend on what requires a gradient.
        upstream: which of them the backward expects a gradient of.
        bools: which of them are bool.
        widths: of those that nobody reads: (position, size that its last axis is expanded to).
        updated: buffers to write back: (position of the output, name of the buffer).
        pieces: the backward, in order; empty for inference.
        arguments: names of the inputs that require a gradient: user inputs, then parameters.
        wrt: those that have one under ``upstream``, in the order of the pieces' ``gives``.
        reads_back: feeds whose numbers the backward needs as they were: their positions.
        keeps_outputs: user outputs whose numbers the backward reads: their positions.
        early: whether each piece hands out its own gradients, before the next one runs.
        programs: the programs before lowering, for reports and for saving.
        lowered: the programs as they run.
        seconds: what each stage took.
        linked: for each output the others that it is computed from; empty where none is.
    """

    forward: Compiled
    exchange: Exchange
    feeds: tuple[tuple[Role, str], ...]
    outputs: int
    reachable: tuple[bool, ...]
    upstream: tuple[bool, ...]
    bools: tuple[int, ...]
    widths: tuple[tuple[int, int], ...]
    updated: tuple[tuple[int, str], ...]
    pieces: tuple[Piece, ...] = ()
    arguments: tuple[str, ...] = ()
    wrt: tuple[str, ...] = ()
    reads_back: tuple[int, ...] = ()
    keeps_outputs: tuple[int, ...] = ()
    early: bool = False
    programs: tuple[Program, ...] = ()
    lowered: tuple[Program, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    linked: Links = ()


@dataclass(frozen=True)
class Checked:
    """A forward program one of whose outputs has a bit for each check that does not hold.

    Attributes:
        compiled: the program.
        exchange: of tensors with it.
        checks: by their bits.
        position: of that output.
        seed: where the seed is among the feeds; None where the output does not depend on it.
    """

    compiled: Compiled
    exchange: Exchange
    checks: tuple[Check, ...]
    position: int
    seed: int | None

    @property
    def source(self) -> str:
        """Of the program."""
        return self.compiled.source

    def run_values(self, feeds: Any) -> Any:
        """Runs on values in input order.

        Raises:
            CheckFailed: the module goes another way, or raises; or the runtime fails, as it may
                where sizes are not those of the graph's way.
        """
        seed = None if self.seed is None else int(self.exchange.give(feeds[self.seed]))
        try:
            fetches = self.compiled.run_values(feeds)
        except ExecutionError as error:
            raise self._failed(seed, error.where, f"{error.what}: {error.because}") from error
        if bits := int(self.exchange.at(fetches, self.position, False)):
            failed = [check for bit, check in enumerate(self.checks) if bits >> bit & 1]
            places = dict.fromkeys(check.where for check in failed if check.where)
            reasons = dict.fromkeys(check.because for check in failed)
            raise self._failed(seed, listing([*places]), listing([*reasons]))
        return fetches

    def _failed(self, seed: int | None, where: str, because: str) -> CheckFailed:
        error = CheckFailed(
            "the graph does not hold for values of this call",
            where=where,
            because=because,
            help="none is needed: such calls run in PyTorch",
        )
        error.seed = seed
        return error


class Stopwatch:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Adds the time inside to a stage."""
        start = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


def build(
    program: Program,
    wrt: Sequence[str],
    outputs: Sequence[str] | None,
    executor: Executor,
    *,
    pieces: int = 0,
    early: bool = False,
    sizes: dict[str, int] | None = None,
    budget: Budget | None = None,
    cache: Cache | None = None,
) -> Plan:
    """Differentiates, cuts, lowers and compiles a captured program.

    Args:
        program: the forward program; left as it is.
        wrt: names of the inputs that require a gradient; none for inference.
        outputs: names of the outputs that will receive one.
        executor: what compiles it.
        pieces: of the backward; 0 decides by the bytes that are saved, and by early gradients'.
        early: whether each piece hands out its own gradients, before the next one runs: to other
            processes, or to hooks that use them up.
        sizes: example value of each symbolic dimension, for that decision.
        budget: of memory for the step at these sizes; None keeps what makes it fast.
        cache: of cut and lowered programs.

    Returns:
        The plan of the step.

    Raises:
        BudgetError: it cannot be kept.
    """
    watch = Stopwatch()

    def make() -> list[Program]:
        programs = cut(program, wrt, outputs, executor, pieces, early, sizes or {}, watch, budget)
        with watch("lower"):
            return [*programs, *(executor.lower(p) for p in programs)]

    def decided_by() -> Iterator[object]:  # made only where there is a cache to ask
        yield program.serialize()
        yield from (tuple(wrt), outputs, pieces, early, sizes, budget, repr(executor))
        yield from foreign_rules()
        yield from (step.name for step in PIPELINES["training"])

    reached = reachable(program.graph, program.named(wrt))
    users = program.outputs(Role.USER_OUTPUT, Role.LOSS)

    def planned(both: Sequence[Program]) -> Plan:
        programs, lowered = list(both[: len(both) // 2]), list(both[len(both) // 2 :])
        sources = wire(programs, lowered[1:])
        with watch("compile"):
            compiled = [executor.compile(p) for p in lowered]
        return _plan(
            programs,
            lowered,
            compiled,
            sources,
            executor.exchange,
            tuple(wrt),
            tuple(v in reached for v in users),
            {
                v.name or ""
                for v in users
                if v in reached and (outputs is None or v.name in outputs)
            },
            early,
            watch.seconds,
            links(program.graph, users, reached) if wrt else (),
        )

    return (cache or Cache(None)).served(decided_by(), make, planned)


_TURN = {"feed": 0, "fetch": 0, "upstream": 1, "carry": 2}


def cut(
    program: Program,
    wrt: Sequence[str],
    outputs: Sequence[str] | None,
    executor: Executor,
    pieces: int,
    early: bool,
    sizes: dict[str, int],
    watch: Stopwatch,
    budget: Budget | None = None,
) -> list[Program]:
    """The forward and the backward pieces of a program, before lowering."""
    if not wrt:
        alone = program.clone()
        if expand(alone.graph, opset=program.opset, only=is_custom_gradient):
            clean(alone)
        return [alone]
    with watch("differentiate"):
        whole = differentiate(program, wrt, outputs, keep=executor.keeps, sizes=sizes)
    if not whole.outputs(Role.GRADIENT):
        return [whole]
    with watch("rewrite"):
        rewrite(whole, "training")
    with watch("partition"):
        programs = partition(whole, 1, executor.cheap)
        sent = _gradient_bytes(whole) if early else 0
        held = 0 if executor.frees else saved_bytes(programs, sizes)
        wanted = max(held // PIECE_BYTES, sent // MESSAGE_BYTES)
        count = pieces or max(1, min(MOST_PIECES, wanted))
        if budget is not None:
            return within(whole, budget, sizes, count, executor.cheap)
        return partition(whole, count, executor.cheap) if count > 1 else programs


def _gradient_bytes(whole: Program) -> int:
    """Of those whose size is known, as that of every parameter is."""
    gradients = whole.outputs(Role.GRADIENT)
    return int(sum((shapes.size(v) or 0) * (v.dtype.itemsize if v.dtype else 4) for v in gradients))


def wire(programs: Sequence[Program], backward: Sequence[Program]) -> list[tuple[Source, ...]]:
    """Where the inputs of each lowered backward piece come from.

    They are put into an order in place: what the forward leaves, then what arrives, then what
    earlier pieces have made. What a user has got as well has that role, and is no executor's own.
    """
    forward = programs[0].graph
    users = [v for v in forward.outputs if role_of(v) in (Role.USER_OUTPUT, Role.LOSS)]
    feed = {v.name: i for i, v in enumerate(forward.inputs)}
    fetch = {v.name: i for i, v in enumerate(forward.outputs)}
    user = {v.name: i for i, v in enumerate(users)}
    carried: dict[str | None, int] = {}
    wired = []

    def source(value: ir.Value) -> Source:
        if role_of(value) is Role.OUTPUT_GRADIENT:
            return Source("upstream", user[target_of(value)])
        for kind, places in (("carry", carried), ("feed", feed)):
            if value.name in places:
                return Source(kind, places[value.name])
        return Source("fetch", fetch[value.name])

    for made, program in zip(programs[1:], backward, strict=True):
        inputs = program.graph.inputs
        found = {value: source(value) for value in inputs}
        order = sorted(found, key=lambda value: _TURN[found[value].kind])
        for value, taken in found.items():
            role = role_of(forward.outputs[taken.index]) if taken.kind == "fetch" else None
            if role is not None and role is not Role.SAVED:
                set_role(value, role)
        inputs.clear()
        inputs.extend(order)
        wired.append(tuple(found[value] for value in order))
        for value in made.graph.outputs:
            if role_of(value) is not Role.GRADIENT:
                carried[value.name] = len(carried)
    return wired


def _plan(
    programs: list[Program],
    lowered: list[Program],
    compiled: list[Compiled],
    sources: list[tuple[Source, ...]],
    exchange: Exchange,
    arguments: tuple[str, ...],
    reachable: tuple[bool, ...],
    upstream: set[str],
    early: bool,
    seconds: dict[str, float],
    linked: Links,
) -> Plan:
    forward, *backward = programs
    feeds = tuple((role_of(v) or Role.USER_INPUT, v.name or "") for v in lowered[0].graph.inputs)
    outs = list(forward.graph.outputs)
    users = [v for v in outs if role_of(v) in (Role.USER_OUTPUT, Role.LOSS)]
    wrt: list[str] = []
    pieces: list[Piece] = []
    for program, runs, takes in zip(backward, compiled[1:], sources, strict=True):
        gives, carries = [], []
        for i, value in enumerate(program.graph.outputs):
            if role_of(value) is Role.GRADIENT:
                gives.append((i, len(wrt)))
                wrt.append(target_of(value))
            else:
                carries.append(i)
        pieces.append(Piece(runs, takes, tuple(gives), tuple(carries)))
    last = {t.index: i for i, p in enumerate(pieces) for t in p.takes if t.kind == "carry"}
    for i, piece in enumerate(pieces):
        pieces[i] = replace(piece, frees=tuple(index for index, at in last.items() if at == i))
    # Numbers may change in place where the backward asks for sizes alone.
    read: set[tuple[str, int]] = set()
    for program, takes in zip(lowered[1:], sources, strict=True):
        needed = dependencies(program.graph, program.graph.outputs, sizes=False)
        taken = zip(program.graph.inputs, takes, strict=True)
        read |= {(source.kind, source.index) for value, source in taken if value in needed}
    again = _read_by_checkpoints(backward)
    read -= {("feed", i) for i, (_, name) in enumerate(feeds) if name in again}
    return Plan(
        forward=_checked(compiled[0], exchange, lowered[0].graph),
        exchange=exchange,
        feeds=feeds,
        outputs=len(users),
        reachable=reachable,
        upstream=tuple((v.name or "") in upstream for v in users),
        bools=tuple(i for i, v in enumerate(users) if v.dtype is ir.DataType.BOOL),
        widths=tuple((i, width) for i, v in enumerate(users) if (width := width_of(v))),
        updated=tuple(
            (i, target_of(v)) for i, v in enumerate(outs) if role_of(v) is Role.UPDATED_BUFFER
        ),
        pieces=tuple(pieces),
        arguments=arguments,
        wrt=tuple(wrt),
        reads_back=tuple(sorted(i for kind, i in read if kind == "feed")),
        keeps_outputs=tuple(sorted(i for kind, i in read if kind == "fetch" and i < len(users))),
        early=early,
        programs=tuple(programs),
        lowered=tuple(lowered),
        seconds=seconds,
        linked=linked,
    )


def _read_by_checkpoints(backward: Sequence[Program]) -> set[str]:
    """Inputs that only checkpoints of the user's read.

    Their numbers may change before the backward: a checkpoint in PyTorch computes with a weight as
    it is then.
    """
    read: dict[str, bool] = {}
    for program in backward:
        for value in program.graph.inputs:
            name, inside = value.name or "", all(is_checkpointed(n) for n in value.consumers())
            read[name] = read.get(name, True) and inside
    return {name for name, inside in read.items() if inside}


def _checked(compiled: Compiled, exchange: Exchange, graph: ir.Graph) -> Any:
    """A forward program that raises where its check does not hold, if it has one."""
    seeds = [i for i, v in enumerate(graph.inputs) if role_of(v) is Role.SEED]
    for position, value in enumerate(graph.outputs):
        if role_of(value) is Role.CHECK:
            depends = dependencies(graph, [value])
            seed = next((i for i in seeds if graph.inputs[i] in depends), None)
            return Checked(compiled, exchange, checks_of(value), position, seed)
    return compiled


def likely_upstream(program: Program, wrt: Sequence[str] | None = None) -> list[str]:
    """The outputs that will probably receive a gradient: the loss alone where there is one.

    The first floating scalar is taken for a loss, which models return behind others, too. The guess
    costs nothing but time: a backward with other gradients builds its own step.

    Args:
        program: the forward.
        wrt: names of the inputs that require gradients, on which such an output depends; None
            where they are not known.
    """
    floats = [v for v in program.outputs(Role.USER_OUTPUT, Role.LOSS) if v.dtype in shapes.FLOATING]
    if wrt:
        reached = reachable(program.graph, program.named(wrt))
        floats = [v for v in floats if v in reached]
    scalars = [v for v in floats if v.shape is not None and len(v.shape) == 0]
    return [v.name or "" for v in scalars[:1] or floats]

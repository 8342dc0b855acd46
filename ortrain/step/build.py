"""From a captured program to a compiled step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import onnx_ir as ir

from ortrain.autodiff.engine import differentiate, reachable
from ortrain.autodiff.partition import partition, saved_bytes
from ortrain.autodiff.registry import foreign_rules
from ortrain.cache import Cache
from ortrain.errors import CheckFailed, ExecutionError, listing
from ortrain.graph import shapes
from ortrain.graph.walk import dependencies
from ortrain.passes import PIPELINES, rewrite
from ortrain.program import Check, Program, Role, checks_of, role_of, target_of

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
        compiled: its session.
        takes: where its inputs come from: feeds and fetches, then upstream, then carried ones.
        gives: the positions of its outputs: ``(position, index of the gradient)``.
        carries: positions of its outputs that later pieces take.
        frees: of all carried values those that no later piece takes.
    """

    compiled: Any
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
        forward: session of the forward program.
        feeds: its inputs, as (role, name).
        outputs: how many of its outputs the user gets; they come first.
        reachable: which of them depend on what requires a gradient.
        upstream: which of them the backward expects a gradient of.
        bools: which of them are bool.
        updated: buffers to write back: (position of the output, name of the buffer).
        pieces: the backward, in order; empty for inference.
        arguments: names of the inputs that require a gradient: user inputs, then parameters.
        wrt: those that have one under ``upstream``, in the order of the pieces' ``gives``.
        reads_back: feeds that the backward reads: their positions.
        keeps_outputs: user outputs whose memory the backward reads: their positions.
        exchanged: whether gradients go to other processes, so that each piece hands out its own.
        programs: the programs before lowering, for reports and for saving.
        lowered: the programs as they run.
        seconds: what each stage took.
    """

    forward: Any
    feeds: tuple[tuple[Role, str], ...]
    outputs: int
    reachable: tuple[bool, ...]
    upstream: tuple[bool, ...]
    bools: tuple[int, ...]
    updated: tuple[tuple[int, str], ...]
    pieces: tuple[Piece, ...] = ()
    arguments: tuple[str, ...] = ()
    wrt: tuple[str, ...] = ()
    reads_back: tuple[int, ...] = ()
    keeps_outputs: tuple[int, ...] = ()
    exchanged: bool = False
    programs: tuple[Program, ...] = ()
    lowered: tuple[Program, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Checked:
    """A forward session one of whose outputs has a bit for each check that does not hold.

    Attributes:
        compiled: the session.
        checks: by their bits.
        position: of that output.
        seed: where the seed is among the feeds; None where the output does not depend on it.
    """

    compiled: Any
    checks: tuple[Check, ...]
    position: int
    seed: int | None

    def run_values(self, feeds: Any) -> Any:
        """Runs on values in input order.

        Raises:
            CheckFailed: the module goes another way, or raises; or the runtime fails, as it may
                where sizes are not those of the graph's way.
        """
        try:
            fetches = self.compiled.run_values(feeds)
        except ExecutionError as error:
            raise self._failed(feeds, error.where, f"{error.what}: {error.because}") from error
        if bits := int(fetches[self.position].numpy()):
            failed = [check for bit, check in enumerate(self.checks) if bits >> bit & 1]
            places = dict.fromkeys(check.where for check in failed if check.where)
            reasons = dict.fromkeys(check.because for check in failed)
            raise self._failed(feeds, listing([*places]), listing([*reasons]))
        return fetches

    def _failed(self, feeds: Any, where: str, because: str) -> CheckFailed:
        error = CheckFailed(
            "the graph does not hold for values of this call",
            where=where,
            because=because,
            help="none is needed: such calls run in PyTorch",
        )
        if self.seed is not None:
            error.seed = int(feeds[self.seed].numpy())
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
    executor: Any,
    *,
    pieces: int = 0,
    exchanged: bool = False,
    sizes: dict[str, int] | None = None,
    cache: Cache | None = None,
) -> Plan:
    """Differentiates, cuts, lowers and compiles a captured program.

    Args:
        program: the forward program; left as it is.
        wrt: names of the inputs that require a gradient; none for inference.
        outputs: names of the outputs that will receive one.
        executor: what compiles it.
        pieces: of the backward; 0 decides by the bytes that are saved, and that are exchanged.
        exchanged: whether gradients go to other processes.
        sizes: example value of each symbolic dimension, for that decision.
        cache: of cut and lowered programs.

    Returns:
        The plan of the step.
    """
    watch = Stopwatch()

    def make() -> list[Program]:
        programs = cut(program, wrt, outputs, pieces, exchanged, sizes or {}, watch)
        with watch("lower"):
            return [*programs, *(executor.lower(p) for p in programs)]

    def decided_by() -> Iterator[object]:  # made only where there is a cache to ask
        yield program.serialize()
        yield from (tuple(wrt), outputs, pieces, exchanged, sizes, repr(executor))
        yield from foreign_rules()
        yield from (step.name for step in PIPELINES["training"])

    reached = reachable(program.graph, [program.input(name) for name in wrt])
    users = program.outputs(Role.USER_OUTPUT, Role.LOSS)

    def planned(both: Sequence[Program]) -> Plan:
        programs, lowered = list(both[: len(both) // 2]), list(both[len(both) // 2 :])
        with watch("compile"):
            compiled = [executor.compile(p) for p in lowered]
        return _plan(
            programs,
            lowered,
            compiled,
            tuple(wrt),
            tuple(v in reached for v in users),
            {
                v.name or ""
                for v in users
                if v in reached and (outputs is None or v.name in outputs)
            },
            exchanged,
            watch.seconds,
        )

    return (cache or Cache(None)).served(decided_by(), make, planned)


_TURN = {"feed": 0, "fetch": 0, "upstream": 1, "carry": 2}


def cut(
    program: Program,
    wrt: Sequence[str],
    outputs: Sequence[str] | None,
    pieces: int,
    exchanged: bool,
    sizes: dict[str, int],
    watch: Stopwatch,
) -> list[Program]:
    """The forward and the backward pieces of a program, before lowering."""
    if not wrt:
        return [program.clone()]
    with watch("differentiate"):
        whole = differentiate(program, wrt, outputs)
    if not whole.outputs(Role.GRADIENT):
        return [whole]
    with watch("rewrite"):
        rewrite(whole, "training")
    with watch("partition"):
        programs = partition(whole, 1)
        sent = _gradient_bytes(whole) if exchanged else 0
        wanted = max(saved_bytes(programs, sizes) // PIECE_BYTES, sent // MESSAGE_BYTES)
        count = pieces or max(1, min(MOST_PIECES, wanted))
        return partition(whole, count) if count > 1 else programs


def _gradient_bytes(whole: Program) -> int:
    """Of those whose size is known, as that of every parameter is."""
    gradients = whole.outputs(Role.GRADIENT)
    return int(sum((shapes.size(v) or 0) * (v.dtype.itemsize if v.dtype else 4) for v in gradients))


def _plan(
    programs: list[Program],
    lowered: list[Program],
    compiled: list[Any],
    arguments: tuple[str, ...],
    reachable: tuple[bool, ...],
    upstream: set[str],
    exchanged: bool,
    seconds: dict[str, float],
) -> Plan:
    forward, *backward = programs
    feeds = tuple((role_of(v) or Role.USER_INPUT, v.name or "") for v in lowered[0].graph.inputs)
    outs = list(forward.graph.outputs)
    users = [v for v in outs if role_of(v) in (Role.USER_OUTPUT, Role.LOSS)]
    feed_index = {name: i for i, (_, name) in enumerate(feeds)}
    fetch_index = {v.name: i for i, v in enumerate(outs)}
    user_index = {v.name: i for i, v in enumerate(users)}
    carried: dict[str, int] = {}
    wrt: list[str] = []
    pieces = []
    for source_program, program, session in zip(backward, lowered[1:], compiled[1:], strict=True):
        takes = []
        for value in program.graph.inputs:
            name = value.name or ""
            if role_of(value) is Role.OUTPUT_GRADIENT:
                takes.append((name, Source("upstream", user_index[target_of(value)])))
            elif name in carried:
                takes.append((name, Source("carry", carried[name])))
            elif name in feed_index:
                takes.append((name, Source("feed", feed_index[name])))
            else:
                takes.append((name, Source("fetch", fetch_index[name])))
        takes.sort(key=lambda take: _TURN[take[1].kind])
        session = replace(session, input_names=[name for name, _ in takes])
        gives, carries = [], []
        for i, value in enumerate(source_program.graph.outputs):
            if role_of(value) is Role.GRADIENT:
                gives.append((i, len(wrt)))
                wrt.append(target_of(value))
            else:
                carried[value.name or ""] = len(carried)
                carries.append(i)
        sources = tuple(source for _, source in takes)
        pieces.append(Piece(session, sources, tuple(gives), tuple(carries)))
    last = {t.index: i for i, p in enumerate(pieces) for t in p.takes if t.kind == "carry"}
    for i, piece in enumerate(pieces):
        pieces[i] = replace(piece, frees=tuple(index for index, at in last.items() if at == i))
    read = {t.index for p in pieces for t in p.takes if t.kind == "feed"}
    fetched = {t.index for p in pieces for t in p.takes if t.kind == "fetch"}
    return Plan(
        forward=_checked(compiled[0], lowered[0].graph),
        feeds=feeds,
        outputs=len(users),
        reachable=reachable,
        upstream=tuple((v.name or "") in upstream for v in users),
        bools=tuple(i for i, v in enumerate(users) if v.dtype is ir.DataType.BOOL),
        updated=tuple(
            (i, target_of(v)) for i, v in enumerate(outs) if role_of(v) is Role.UPDATED_BUFFER
        ),
        pieces=tuple(pieces),
        arguments=arguments,
        wrt=tuple(wrt),
        reads_back=tuple(sorted(read)),
        keeps_outputs=tuple(sorted(i for i in fetched if i < len(users))),
        exchanged=exchanged,
        programs=tuple(programs),
        lowered=tuple(lowered),
        seconds=seconds,
    )


def _checked(compiled: Any, graph: ir.Graph) -> Any:
    """A forward session that raises where its check does not hold, if it has one."""
    for position, value in enumerate(graph.outputs):
        if role_of(value) is Role.CHECK:
            depends = dependencies(graph, [value])
            seeds = (i for i, v in enumerate(graph.inputs) if role_of(v) is Role.SEED)
            seed = next((i for i in seeds if graph.inputs[i] in depends), None)
            return Checked(compiled, checks_of(value), position, seed)
    return compiled


def likely_upstream(program: Program) -> list[str]:
    """The outputs that will probably receive a gradient: the loss alone where there is one.

    A floating scalar in the first place is taken for a loss. The guess costs nothing but time: a
    backward with other gradients builds its own step.
    """
    floats = [v for v in program.outputs(Role.USER_OUTPUT, Role.LOSS) if v.dtype in shapes.FLOATING]
    if floats and floats[0].shape is not None and len(floats[0].shape) == 0:
        floats = floats[:1]
    return [v.name or "" for v in floats]

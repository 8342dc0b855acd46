"""The ways of exporting a module, tried in order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, TensorArgument

from ortrain.capture.trace import exporter
from ortrain.capture.trace.asked_mode import left_by_a_call, questions_noted
from ortrain.capture.trace.assigned_buffers import assignments, assignments_as_writes
from ortrain.capture.trace.call import Axes, Call, explicit_signature
from ortrain.capture.trace.candidates import drawing_codes
from ortrain.capture.trace.constants import constants_of
from ortrain.capture.trace.decisions import Asked, asked, decided
from ortrain.capture.trace.keeping import keeper, live_modules
from ortrain.capture.trace.layouts import layouts_that_decide
from ortrain.capture.trace.outcomes import constraints_of
from ortrain.capture.trace.packed import no_packed_sequences
from ortrain.capture.trace.refusal import (
    Refusal,
    asking_for_layout,
    assigning,
    by_chance,
    empty,
    ending,
    keeping,
    refusal,
    seeding_itself,
    sharing_memory,
    side_effects,
    unseen,
)
from ortrain.capture.trace.rehearsal import rehearsed
from ortrain.capture.trace.routines import kept_routines
from ortrain.capture.trace.seeding import seeding_watched
from ortrain.capture.trace.value_checks import Ways
from ortrain.errors import CaptureError
from ortrain.guards.call_kinds import Kinds
from ortrain.guards.constraints import Constraints
from ortrain.guards.handed import Handed, handed_over, unhanded
from ortrain.guards.key_value_cache import opened_caches
from ortrain.kept.parameter import memory_of
from ortrain.module_state.survey import Survey, compared
from ortrain.module_state.untouched import (
    Effects,
    Filling,
    call_aside,
    calls_aside,
    untouched,
    watched,
)

# Where random numbers lead fewer of the calls the way of the graph, PyTorch would get the module.
LEAST_CHANCE = 0.75
# Rows of a batch that show what a call leaves behind. All of BERT-base's 8 x 128 took 0.8 s of a
# capture of 3.2.
ROWS = 2


@dataclass(frozen=True)
class Rung:
    """One way of exporting.

    Attributes:
        name: for the report.
        dims: position of a tensor → its symbolic axes, as torch.export takes them.
        strict: trace with Dynamo.
        oblivious: do not let a size of 1 decide anything.
        grown: axes (position, axis) of size 1 along which the example is repeated.
        own: trace with the module's own example.
    """

    name: str
    dims: dict[int, dict[int, Any]]
    strict: bool = False
    oblivious: bool = False
    grown: frozenset[tuple[int, int]] = frozenset()
    own: bool = False


@dataclass
class Exported:
    """An export that came about.

    Attributes:
        program: of torch.export.
        constraints: on the shapes.
        rung: how it was made.
        refused_shape: why the example itself cannot use it; empty if it can.
        fixes_batch: the leading dimensions that became constants.
        failed: what was tried before.
        fillings: what the forward put where it found nothing.
        branches: whether it goes the example's way at branches on values.
        by_values: whether code that asks if it is traced goes by values in a call that is not.
    """

    program: ExportedProgram
    constraints: Constraints
    rung: str
    refused_shape: str
    fixes_batch: str
    failed: tuple[str, ...] = ()
    fillings: tuple[Filling, ...] = ()
    branches: bool = False
    by_values: bool = False


def _rungs(call: Call, axes: Axes, exact: bool) -> list[Rung]:
    """What is tried, in order.

    A size of 1 is special to PyTorch (it may broadcast), so that the trace would fix it. Where it
    is a batch or a length of 1, the example is repeated along that axis before it is traced; the
    trace looks at no values. Only if that fails, PyTorch is asked to take 1 for any other size.
    A module that knows more of its arguments has an example of its own instead.
    """
    every = {
        leaf.position: dict.fromkeys(leaf.symbolic_axes(axes), Dim.AUTO) for leaf in call.tensors
    }
    rungs = [Rung("non-strict", every), Rung("strict", every, strict=True)]
    if call.example is not None and not exact:
        return [Rung("example of the module", every, own=True), *rungs]
    batches, lengths = call.growable()
    if exact or (not batches and not lengths):
        return rungs
    grown = [Rung("batch of 1 repeated", every, grown=frozenset(batches))] if batches else []
    if lengths:
        both = frozenset(batches | lengths)
        grown.insert(0, Rung("batch or length of 1 repeated", every, grown=both))
    return [*grown, Rung("sizes of 1 kept symbolic", every, oblivious=True), *rungs]


def export(
    module: torch.nn.Module,
    call: Call,
    axes: Axes = Axes.ALL,
    exact: bool = False,
    branches: bool = False,
) -> Exported:
    """The first export whose graph can serve the call.

    Args:
        module: what is captured.
        call: the example.
        axes: which dimensions become symbols.
        exact: sizes of 1 become constants.
        branches: go the example's way at branches on values.
    """
    for leaf in call.tensors:
        if not leaf.value.numel():
            raise empty(leaf.name, tuple(leaf.value.shape))
    failed: list[str] = []
    refusals: list[Refusal] = []
    fillings = rehearsed(module, call.args, call.kwargs)
    for rung in _rungs(call, axes, exact or axes is Axes.NONE):
        try:
            found = _attempt(module, call, rung, branches)
        except Refusal as error:
            failed.append(f"{rung.name}: {error.because}")
            # Where a size of 1 stands for others, a branch on one value asks for several.
            if not ((rung.grown or rung.oblivious) and error.several):
                refusals.append(error)
            if error.final:
                break
            continue
        fillings += found.fillings  # which another trace finds, should this one not be chosen
        if found.fixes_batch and not rung.strict:
            # Python such as int(size) makes it a number; Dynamo sees through it.
            with contextlib.suppress(Refusal), _calls_of_the_chosen() as chosen:
                other = _attempt(module, call, replace(rung, name="strict", strict=True), branches)
                fillings += other.fillings
                if other.refused_shape == "" and not other.fixes_batch:
                    failed.append(f"{rung.name}: it would fix {found.fixes_batch}")
                    found = other
                    chosen.append(other)
        if found.refused_shape:  # the example had been repeated, and the graph needs it so
            failed.append(f"{rung.name}: {found.refused_shape}")
            continue
        found.failed = tuple(failed)
        found.fillings = tuple(fillings)
        return found
    first, *others = refusals
    raise first.after(others, failed) from first.__cause__


@contextlib.contextmanager
def _calls_of_the_chosen() -> Iterator[list[Exported]]:
    """Puts the kept calls of the trace before back, unless another trace is chosen inside."""
    known, chosen = keeper(), list[Exported]()
    held = None if known is None else (known.calls, known.results)
    try:
        yield chosen
    finally:
        if known is not None and held is not None and not chosen:
            known.calls, known.results = held


def _attempt(module: torch.nn.Module, call: Call, rung: Rung, branches: bool) -> Exported:
    """An export on a rung; the next one finds the module as this one, if it fails."""
    with untouched(module, by_failures=True):
        return _exported(module, call, rung, branches)


def _exported(module: torch.nn.Module, call: Call, rung: Rung, branches: bool) -> Exported:
    example = call.replaced() if rung.own else call.grown(rung.grown)
    ways = Ways() if branches and not rung.strict else None
    retried = contextlib.nullcontext() if ways is None else untouched(module, by_failures=True)
    try:
        with retried:
            program, effects, questions = _trace(module, call, rung, example, ways)
    except Refusal as first:
        if ways is None or not (ways.missed or first.by_value):
            raise
        with (
            contextlib.suppress(Exception),
            calls_aside(module, example.args, example.kwargs) as noted_call,
            ways.noted(),  # of the call alone, and not of what is looked at before it
        ):
            noted_call()
        if ways.chance < LEAST_CHANCE:
            raise by_chance(ways.drawn, ways.chance) from None
        try:
            program, effects, questions = _trace(module, call, rung, example, ways)
        except Refusal as second:
            # It came further, unless it was for a number that is a tensor now.
            further = second.several or (second.final and not second.by_value)
            told = second if further else first
            raise told from told.__cause__
    if effects.fillings:
        # What it found missing it now finds; if that changes nothing, the graph is that of both.
        for filling in effects.fillings:  # a strict trace leaves the module as it was
            filling.apply()
        again, later, _ = _trace(module, call, rung, example, ways)
        if later.fillings or not _alike(program, again):
            raise assigning([each.path for each in effects.fillings], module)
    if tensors := _differentiable(module, program):
        raise ending(tensors)
    if names := _shared(module, program):
        raise sharing_memory(names)
    _unify_batch(program, example)
    try:
        constraints = _constraints(program, call, questions, branches)
    except CaptureError as error:
        raise refusal(module, error) from error
    if questions.about_tracing:
        few = _few_rows(program, example, constraints)
        left, questions.by_values = left_by_a_call(module, few.args, few.kwargs, effects)
        if found := side_effects(left, module):
            raise found
    shapes = [tuple(leaf.value.shape) for leaf in call.tensors]
    fixed = [
        f"{constraints.names[i]}.shape[0]"
        for (i, axis) in constraints.static
        if axis == 0 and (shapes[i][0] != 1 or rung.grown or rung.own)
    ]
    return Exported(
        program,
        constraints,
        rung.name,
        constraints.why_not(shapes),
        ", ".join(fixed),
        fillings=tuple(effects.fillings),
        branches=ways is not None and ways.known,
        by_values=questions.by_values,
    )


def _alike(one: ExportedProgram, two: ExportedProgram) -> bool:
    """Whether two traces compute the same, with the same numbers written in them."""

    def equal(value: Any, other: Any) -> bool:
        if not (isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)):
            return value is other
        return value.dtype == other.dtype and torch.equal(value, other)

    return (
        one.graph_module.code == two.graph_module.code
        and one.constants.keys() == two.constants.keys()
        and all(equal(value, two.constants[name]) for name, value in one.constants.items())
    )


def _trace(
    module: torch.nn.Module, call: Call, rung: Rung, example: Any, ways: Ways | None
) -> tuple[ExportedProgram, Effects, Asked]:
    """The exported program, what the forward did besides, and what it asked about sizes.

    Raises:
        Refusal: a graph would miss something of it.
    """
    # Dynamo would trace the hooks that watch: there the forward runs for real, once more.
    watching = (
        watched(module, live=live_modules(module))
        if not rung.strict
        else contextlib.nullcontext(Effects())
    )
    # Dynamo refuses a forward that seeds, and sets the state itself.
    seeding: contextlib.AbstractContextManager[list[str]] = (
        contextlib.nullcontext([]) if rung.strict else seeding_watched()
    )
    # Its way is followed by a call that is not traced in any case.
    noting: contextlib.AbstractContextManager[list[str]] = (
        contextlib.nullcontext([]) if rung.strict else questions_noted()
    )
    known = keeper()
    # Dynamo's are looked for below.
    written = assignments_as_writes(module) if not rung.strict else contextlib.nullcontext()
    try:
        with (
            _as_parameters(module),
            # Early, so that what they name is no part of what a graph has frozen.
            kept_routines(module) if not rung.strict else contextlib.nullcontext(),
            watching as effects,
            asked() as questions,
            seeding as seeds,
            explicit_signature(module, call),
            handed_over(module) if not rung.strict else contextlib.nullcontext(),
            opened_caches(module) if not rung.strict else contextlib.nullcontext(),
            written,
            known.watching() if known and not rung.strict else contextlib.nullcontext(),
            # Dynamo leaves in the module what the forward has written: where that is back in
            # place, the call that is watched below writes it again, and is seen to.
            untouched(module) if rung.strict else contextlib.nullcontext(),
            no_packed_sequences(),
            noting as about_tracing,
        ):
            if effects.unwatched:
                raise unseen(effects.unwatched)
            program = exporter.export(
                module,
                example.args,
                example.kwargs,
                call.dynamic_shapes(rung.dims),
                strict=rung.strict,
                oblivious=rung.oblivious,
                ways=ways,
            )
        if rung.strict:
            with (
                watched(module, traced=False) as effects,
                assignments(module) as assigned,
                handed_over(module),
            ):
                output = call_aside(module, example.args, example.kwargs)
            if isinstance(output, Handed):
                raise unhanded()
            if assigned:
                raise keeping(assigned)
    except Exception as error:
        raise refusal(module, error) from error
    if found := side_effects(effects, module):
        if effects.drawn:
            found.codes = drawing_codes(module, example.args, example.kwargs, effects.generators)
        raise found
    if seeds:
        raise seeding_itself()
    questions.about_tracing = bool(about_tracing)
    asked_aside = [] if known is None else known.layouts
    given = (module, example.args, example.kwargs)
    for layout in (*asked_aside, *layouts_that_decide(*given, questions, program)):
        raise asking_for_layout(layout)
    return program, effects, questions


@contextlib.contextmanager
def _as_parameters(module: torch.nn.Module) -> Iterator[None]:
    """Tensors that ``torch.func.functional_call`` has put in parameters' places are parameters.

    ``torch.export`` takes no others there, and Dynamo has them for constants.
    """
    held: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for part in module.modules():
        registry: dict[str, Any] = part._parameters
        for name, tensor in registry.items():
            if tensor is not None and not isinstance(tensor, torch.nn.Parameter):
                held.append((registry, name, tensor))
    made: dict[int, torch.nn.Parameter] = {}
    for registry, name, tensor in held:
        if id(tensor) not in made:
            made[id(tensor)] = torch.nn.Parameter(tensor.detach(), requires_grad=False)
        registry[name] = made[id(tensor)]
    try:
        yield
    finally:
        for registry, name, tensor in held:
            registry[name] = tensor


def _differentiable(module: torch.nn.Module, program: ExportedProgram) -> list[str]:
    """What the graph reads that requires a gradient and is no parameter."""
    found = [n for n, t in program.constants.items() if getattr(t, "requires_grad", False)]
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    held = dict(module.named_buffers(remove_duplicate=False))
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.BUFFER and nodes[spec.arg.name].users:
            name = spec.target or ""
            if name in held and held[name].requires_grad:
                found.append(name)
    return found


def _shared(module: torch.nn.Module, program: ExportedProgram) -> list[str]:
    """The parameters and buffers whose memory constants of the graph have, and no guard compares.

    A guard compares the contents of small tensors, and of large ones the number of writes, which
    those through ``weight.data`` do not count.
    """
    homes = {
        memory_of(tensor): name
        for name, tensor in chain(module.named_parameters(), module.named_buffers())
        if tensor.layout is torch.strided and tensor.numel()
    }
    found = {
        _at(constant): homes[memory_of(constant)]
        for _, constant in constants_of(program)
        if memory_of(constant) in homes
    }
    if found:
        for each in Survey(module).loose:
            if compared(each) is not None:
                found.pop(_at(each), None)
    return sorted({*found.values()})


def _at(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _tensor_shapes(exported: ExportedProgram, call: Call) -> dict[int, tuple[Any, ...]]:
    """The symbolic shape of each tensor of the call, by position."""
    nodes = {n.name: n for n in exported.graph.nodes if n.op == "placeholder"}
    specs = [s for s in exported.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
    return {
        leaf.position: tuple(nodes[spec.arg.name].meta["val"].shape)
        for leaf, spec in zip(call.leaves, specs, strict=True)
        if isinstance(spec.arg, TensorArgument)
    }


def _unify_batch(exported: ExportedProgram, call: Call) -> None:
    """One symbol for leading dimensions that the module never compares.

    An attention mask that is only indexed may have more rows than the tokens, as far as the trace
    knows. Comparing the sizes makes their equality a condition of the capture, and its graph
    simpler; a call where they differ is captured anew.
    """
    shapes = _tensor_shapes(exported, call)
    sizes = {leaf.position: leaf.value.shape for leaf in call.tensors}
    leading = [
        position
        for position, shape in shapes.items()
        if shape and isinstance(shape[0], torch.SymInt) and shape[0].node.expr.is_Symbol
    ]
    for position in leading[1:]:
        first = leading[0]
        if sizes[position][0] == sizes[first][0]:
            bool(shapes[position][0] == shapes[first][0])


def _few_rows(exported: ExportedProgram, call: Call, constraints: Constraints) -> Call:
    """The first rows of a batch, where the same code runs for them; else all of them."""
    shapes = _tensor_shapes(exported, call)
    leading = {
        position: shape[0].node.expr
        for position, shape in shapes.items()
        if shape and isinstance(shape[0], torch.SymInt)
    }
    batch = next(iter(leading.values()), None)
    rest = (
        s.node.expr for each in shapes.values() for s in each[1:] if isinstance(s, torch.SymInt)
    )
    if batch is None or not batch.is_Symbol or any(batch in expr.free_symbols for expr in rest):
        return call
    few = call.with_rows(frozenset(p for p, expr in leading.items() if expr == batch), ROWS)
    every, some = ([leaf.value for leaf in each.tensors] for each in (call, few))
    sizes = [tensor.shape for tensor in some]
    traced = constraints.accepts(sizes) and constraints.assumes(sizes)
    kinds = Kinds(every)
    return few if traced and kinds.of(some) == kinds.of(every) else call


def _constraints(
    exported: ExportedProgram, call: Call, questions: Asked, checked: bool
) -> Constraints:
    shapes = _tensor_shapes(exported, call)
    return constraints_of(
        [leaf.name for leaf in call.tensors],
        [shapes[leaf.position] for leaf in call.tensors],
        decided(exported, questions, checked),
    )

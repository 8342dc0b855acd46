"""``capture``: one call of a module becomes one ONNX program.

::

    captured = capture(model, kwargs={"input_ids": ids, "labels": labels})
    captured.program          # the forward, parameters and buffers as inputs
    captured.accepts(shapes)  # may a call with these shapes use it?
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from ortrain.autodiff.decompose import DECOMPOSES
from ortrain.autodiff.engine import reachable
from ortrain.autodiff.registry import entry_of
from ortrain.cache import Cache
from ortrain.capture import fx
from ortrain.capture.fx.kept import keep_operators
from ortrain.capture.onnx import lift
from ortrain.capture.onnx.doubles import refuse_rounded
from ortrain.capture.onnx.fingerprint import parts_of
from ortrain.capture.onnx.registry import Registry, failed_node, make_standard
from ortrain.capture.onnx.translations import TRANSLATIONS, recorded, translating
from ortrain.capture.onnx.translations.arithmetic import READING_FLOATS
from ortrain.capture.onnx.translations.base import Context, SymbolicSize, symbolic
from ortrain.capture.origin import BESIDE, captured_error, operator_name, origin, own_reason
from ortrain.capture.trace import ladder
from ortrain.capture.trace.call import Axes, Call, example_call, free_name, step_name
from ortrain.capture.trace.constants import read_in_place
from ortrain.capture.trace.decisions import fixed_sizes
from ortrain.capture.trace.exact_numbers import is_made_of_sizes
from ortrain.capture.trace.exporter import check_version, quiet
from ortrain.capture.trace.keeping import Keeper, keeper, keeping, recorded_examples
from ortrain.capture.trace.layers import traceable_layers
from ortrain.capture.trace.refusal import first_line, located, named
from ortrain.capture.trace.returned import Source, sources_of, views_of
from ortrain.capture.trace.seen import seen_routines
from ortrain.capture.trace.sharing import share
from ortrain.errors import CaptureError, UnsupportedOutput
from ortrain.exclusive import EXCLUSIVE
from ortrain.graph.shapes import FLOATING
from ortrain.graph.walk import reads
from ortrain.guards.autocast import Autocast, active
from ortrain.guards.constraints import Constraints, Shapes
from ortrain.guards.handed import Handed
from ortrain.guards.key_value_cache import closed
from ortrain.kept.call import Kept
from ortrain.module_state.untouched import untouched
from ortrain.ops.base import DOMAIN
from ortrain.passes.clean import clean
from ortrain.passes.precision import place_casts
from ortrain.program import Check, Program, Role
from ortrain.uncollected import uncollected

IR_VERSION = 10  # the first that has opset 21; runtimes of its time read it


@dataclass(frozen=True)
class UserInput:
    """A tensor of the call.

    Attributes:
        name: of the program's input; the forward parameter and the way into it: ``past.0.1``.
        position: in ``torch.utils._pytree.tree_leaves((args, kwargs))`` of the example call.
    """

    name: str
    position: int


@dataclass(frozen=True)
class OutputLeaf:
    """One leaf of the module's output.

    Attributes:
        output: index among the program's user outputs; None for a constant.
        constant: what the module returned where it is no tensor: None, a number, a string.
    """

    output: int | None
    constant: Any = None


@dataclass
class Captured:
    """What :func:`capture` returns.

    Attributes:
        program: the forward program. Inputs: the user's tensors, the seed, buffers, parameters.
            Outputs: the user's tensors, updated buffers, a check.
        inputs: the user inputs of the program, in its order.
        dropped: tensors of the call that do not influence it; the program has no input for them.
        tensors: all tensors of the call, by position; the shapes of :meth:`accepts` are theirs.
        output_leaves: the leaves of the module's output, in pytree order.
        output_spec: the pytree of the module's output: ``output_spec.unflatten(leaves)``.
        constraints: which shapes the program is valid for.
        rung: how the module was captured: ``non-strict``, ``batch of 1 repeated``,
            ``batch or length of 1 repeated``, ``sizes of 1 kept symbolic``, ``example of the
            module``, ``strict``.
        failed: what was tried before, and why it did not work.
        seconds: what each part took.
        branches: whether the program goes the example's way at branches on values.
        by_values: whether code that asks if it is traced goes by values in a call that is not.
        returned: the user outputs that are no new contiguous tensors of the module.
        views: those that are copies of what is a view of another tensor in the module.
        kept: calls of the program's nodes that stay PyTorch's.
        held: tensors that are neither parameter nor buffer and inputs all the same, by name.
    """

    program: Program
    inputs: tuple[UserInput, ...]
    dropped: tuple[UserInput, ...]
    tensors: tuple[UserInput, ...]
    output_leaves: tuple[OutputLeaf, ...]
    output_spec: Any
    constraints: Constraints
    rung: str
    failed: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    branches: bool = False
    by_values: bool = False
    returned: dict[int, Source] = field(default_factory=dict)
    views: tuple[int, ...] = ()
    kept: tuple[Kept, ...] = ()
    held: dict[str, torch.Tensor] = field(default_factory=dict)

    def accepts(self, shapes: Shapes) -> bool:
        """Whether a call with these shapes, one for each of :attr:`tensors`, may use the program.

        About 1 us for a transformer's inputs. A size of 1 is accepted where a larger one was
        traced; ``constraints.assumes`` tells these apart.
        """
        return self.constraints.accepts(shapes)

    def rebuild(self, outputs: Sequence[Any]) -> Any:
        """The module's output of the program's user outputs."""
        leaves = [
            leaf.constant if leaf.output is None else outputs[leaf.output]
            for leaf in self.output_leaves
        ]
        return closed(pytree.tree_unflatten(leaves, self.output_spec))


def capture(
    module: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    opset: int = 21,
    exact: bool = False,
    still: bool = False,
    branches: bool = False,
    cache: Cache | None = None,
    keep: Keeper | None = None,
    uncompared: Sequence[torch.Tensor] | None = None,
) -> Captured:
    """Captures a module's forward, in its present mode, as an ONNX program.

    All dimensions of all tensors are symbolic as far as the module's code allows. Neither the
    module nor any random state changes. Autocast that is on around the call is part of it: the
    program has its casts.

    A size of 1 is special to the trace. A module that can say how a call of larger sizes would look
    has a method ``example_for_capture(*args, **kwargs)``, which returns such ``(args, kwargs)`` of
    the same structure, or None; these are traced instead.

    Args:
        module: in train or eval mode.
        args: example positional arguments: tensors, constants, and pytrees of them.
        kwargs: example keyword arguments.
        opset: of the standard ONNX domain. At 22 and above, onnxruntime lacks kernels for random
            draws.
        exact: take sizes of 1 for constants, where the module's code treats them apart.
        still: take the sizes of images for constants. Strides and windows make expressions of them
            that grow from layer to layer: Swin is captured in 5 s of processor time so, else in
            130 s. A module with an example of its own says itself what varies.
        branches: go the example's way at branches on values, and take for granted what ordinary
            numbers of selected elements have in common, as a check of the program says; else only
            those branches are taken of which the other way raises. For whoever looks at the check.
        cache: of programs by their exported graphs: the export runs always, its translation only
            where the cache does not know the result.
        keep: what stays PyTorch's, as nodes of the program; None refuses what cannot be translated.
        uncompared: tensors, neither parameters nor buffers, that may be written to without a trace
            between calls of the program. They, and large constants, are inputs of it with the role
            of buffers. None makes constants of all.

    Raises:
        CaptureError: the module cannot become one graph; the error says where and why.
        UnsupportedInput: an argument is of a type that a graph cannot take.
    """
    check_version()
    autocast = active()
    watch = _Watch()
    state = lift.state_of(module)
    with EXCLUSIVE, traceable_layers():  # the call holds the module's forward
        call = example_call(module, tuple(args), dict(kwargs or {}), taken=state.first)
    still = still and call.example is None
    registry = _registry(opset)

    def program_of(exported: ExportedProgram, held: dict[str, str]) -> Program:
        def make() -> list[Program]:
            return [_program(exported, registry, call, state, watch, branches, autocast, held)]

        if keep is not None and keep.calls:
            return make()[0]  # its nodes name what is there in this process alone
        parts = parts_of(exported, state, opset, branches, autocast, held)
        return (cache or Cache(None)).programs(parts, make)[0]

    if keep is not None:
        keep.module = module
    if keep is not None and keep.routines:  # in whose code all of PyTorch's layers are as always
        with EXCLUSIVE, located(module), uncollected(), untouched(module):
            seen_routines(keep, module, call.args, call.kwargs)
    with (
        EXCLUSIVE,
        located(module),
        uncollected(),
        untouched(module),
        traceable_layers(),
        keeping(keep),
    ):
        failed: list[str] = []
        if keep is not None and keep.modules:
            recorded_examples(keep, module, call.args, call.kwargs)
        # Fewer, where a translation needs a size that was of use as a symbol.
        for axes in [a for a in Axes if a is not (Axes.ALL if still else Axes.STILL)]:
            try:
                found = ladder.export(module, call, axes, exact, branches)
                watch.lap("export")
                returned = sources_of(found.program, [leaf.position for leaf in call.leaves])
                views, fixed = views_of(found.program), fixed_sizes(found.program)
                held = {} if uncompared is None else read_in_place(found.program, uncompared)
                names = _free_names(held, call, state)
                program = program_of(found.program, names)
                if later := fixed_sizes(found.program) - fixed:
                    raise symbolic(f"an operator that needs {', '.join(sorted(later))}")
                _check_sizes(program, found.constraints)
                break
            except SymbolicSize as error:
                if axes is Axes.NONE:
                    raise
                failed.append(f"{axes}: {error.what}")
        found.failed = (*failed, *found.failed)
    for filling in found.fillings:
        filling.apply()
    calls = () if keep is None else keep.kept(program)
    if keep is not None and calls:
        share(calls, module, program, keep.numbers)
    leaves, _ = _outputs(found.program)
    watch.lap("clean-up of the ONNX graph")
    tensors = tuple(UserInput(leaf.name, leaf.position) for leaf in call.tensors)
    by_name = {t.name: t for t in tensors}
    taken = {v.name for v in program.graph.inputs}
    return Captured(
        program=program,
        inputs=tuple(by_name[v.name or ""] for v in program.inputs(Role.USER_INPUT)),
        dropped=tuple(t for t in tensors if t.name not in taken),
        tensors=tensors,
        output_leaves=leaves,
        output_spec=found.program.call_spec.out_spec,
        constraints=found.constraints,
        rung=found.rung,
        failed=found.failed,
        seconds=watch.laps,
        branches=found.branches,
        by_values=found.by_values,
        returned=returned,
        views=views,
        kept=calls,
        held={names[constant]: t for constant, t in held.items() if names[constant] in taken},
    )


def _free_names(constants: Iterable[str], call: Call, state: lift.State) -> dict[str, str]:
    """Names of inputs for constants of the trace, that no other input has."""
    taken, found = {*state.first, *(leaf.name for leaf in call.leaves), "seed"}, {}
    for constant in constants:
        taken.add(name := free_name(constant, taken))
        found[constant] = name
    return found


def _check_sizes(program: Program, constraints: Constraints) -> None:
    """Raises where a size of an input is a number that no condition of the trace has made one."""
    for value in program.inputs(Role.USER_INPUT):
        place = constraints.names.index(value.name or "")
        for axis, dim in enumerate(value.shape or ()):
            if isinstance(dim, int) and (place, axis) not in constraints.static:
                raise symbolic(f"{value.name}.shape[{axis}]")


def _program(
    exported: ExportedProgram,
    registry: Registry,
    call: Call,
    state: lift.State,
    watch: _Watch,
    checked: bool,
    autocast: Autocast,
    held: Mapping[str, str],
) -> Program:
    """The program of an exported graph; of its constants some are inputs, under other names."""
    with quiet():  # kept operators are tried on tensors without contents, and that may fail
        translated = _translate(exported, registry, watch, checked, autocast)
    _, names = _outputs(exported)
    program = lift.lift(
        translated.model,
        call,
        state,
        translated.updated,
        names,
        translated.seed,
        translated.violations,
        translated.checks,
        held,
    )
    clean(program)
    place_casts(program)
    lift.drop_unused_inputs(program)
    for node in program.graph.all_nodes():
        node.name = node.outputs[0].name  # as profilers show it
    return program


class _Watch:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.since = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self.since
        self.since = now


_registries: dict[int, Registry] = {}


def _registry(opset: int) -> Registry:
    """Built once a process and opset."""
    if opset not in _registries:
        ours = {target: recorded(f, opset) for target, f in TRANSLATIONS.items()}
        _registries[opset] = Registry(opset, ours)
    return _registries[opset]


# -- translation ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Translated:
    model: ir.Model
    seed: ir.Value | None
    updated: dict[str, str]  # buffer → name of the value that updates it
    violations: str | None  # name of the value with the bits of the checks that do not hold
    checks: list[Check]


def _translate(
    exported: ExportedProgram,
    registry: Registry,
    watch: _Watch,
    checked: bool,
    autocast: Autocast,
) -> _Translated:
    cleaned = fx.clean(exported, registry.covers, checked, autocast)
    watch.lap("clean-up of the ATen graph")
    missing = list(fx.missing(exported.graph_module, registry.covers))
    keep = keeper()
    if keep is not None and keep.operators:
        missing = keep_operators(
            exported.graph_module, missing, keep, "ortrain has no translation of it"
        )
    for node in missing:
        name = operator_name(node.target)
        if refused := named(name, origin(node, full=True)):
            raise refused
        if not isinstance(node.target, torch._ops.OpOverload):
            raise symbolic(name)
        raise captured_error(
            node,
            f"no translation to ONNX for {name}",
            because="ortrain has none, and uses those of PyTorch's exporter only where they were "
            "seen to agree with PyTorch, gradients included",
            help=f"replace the operator by others; or {BESIDE}",
        )
    model, context = _in_onnx(exported, registry)
    if keep is not None and keep.operators and torch.is_grad_enabled():
        without = _without_gradient(exported, model)
        left = keep_operators(
            exported.graph_module, without, keep, "what it is in ONNX has no gradient rule"
        )
        if len(left) < len(without):
            model, context = _in_onnx(exported, registry)
    model.ir_version = IR_VERSION
    refuse_rounded(model)
    lift.finish_nodes(model)
    watch.lap("translation")
    updated = {buffer: node.name for buffer, node in cleaned.updated.items()}
    violated = None if cleaned.violations is None else cleaned.violations.name
    return _Translated(model, context.seed, updated, violated, cleaned.checks)


def _in_onnx(exported: ExportedProgram, registry: Registry) -> tuple[ir.Model, Context]:
    """The model of a graph all of whose operators are covered, and what its parts share."""
    _check_floats(exported)
    while True:
        with translating() as context:
            try:
                model = registry.translate(exported)
                break
            except Exception as error:
                refused = _translation_error(exported, error)
                if not _kept_instead(exported, error, refused):
                    raise refused from error
    make_standard(model, registry.opset)
    return model, context


def _check_floats(exported: ExportedProgram) -> None:
    """Raises where an operator reads a float made of sizes that its translation may take amiss.

    ``torch.arange(0, size / 2)`` has a number of elements that is rounded up.
    """
    for node in exported.graph.nodes:
        if is_made_of_sizes(node.meta.get("val")):
            for user in node.users:
                if user.target not in READING_FLOATS:
                    raise symbolic(f"{operator_name(user.target)} of a size that became a float")


def _kept_instead(exported: ExportedProgram, error: Exception, refused: CaptureError) -> bool:
    """Whether an operator whose translation fails stays PyTorch's instead."""
    keep, name = keeper(), failed_node(error)
    if keep is None or not keep.operators or isinstance(refused, SymbolicSize):
        return False
    nodes = [n for n in exported.graph.nodes if n.name == name and n.op == "call_function"]
    because = refused.because or "ortrain has no translation of it in this form"
    return bool(nodes) and not keep_operators(exported.graph_module, nodes, keep, because)


def _without_gradient(exported: ExportedProgram, model: ir.Model) -> list[torch.fx.Node]:
    """Operators between inputs and outputs of which some ONNX operator has no gradient rule."""
    parameters = set(exported.graph_signature.parameters)
    held = [v for n, v in model.graph.initializers.items() if n in parameters]
    given = [v for v in (*model.graph.inputs, *held) if v.dtype in FLOATING]
    reached = reachable(model.graph, given)
    found: dict[torch.fx.Node, None] = {}
    for node in model.graph:
        source = node.meta.get("node")
        known = entry_of(node) is not None or node.op_type in DECOMPOSES or node.domain == DOMAIN
        if not known and source is not None and any(v in reached for v in reads(node)):
            found[source] = None
    return list(found)


def _translation_error(exported: ExportedProgram, error: BaseException) -> CaptureError:
    """The innermost reason, at the node whose translation failed."""
    name = failed_node(error)
    node = next((n for n in exported.graph.nodes if n.name == name), None)
    while error.__cause__ is not None:
        error = error.__cause__
    kind: type[CaptureError] = CaptureError
    if isinstance(error, CaptureError):
        kind, what, because, help = type(error), error.what, error.because, error.help
    else:
        name = "an operator" if node is None else operator_name(node.target)
        what = f"{name} cannot be translated to ONNX in this form"
        because = own_reason(error, "translating it") or (
            f"its translation fails with {type(error).__name__}: {first_line(error)}"
        )
        help = f"replace the operator by others; or {BESIDE}"
    where = origin(node, full=True) if node is not None else ""
    return kind(what, where=where, because=because, help=help)


def _outputs(exported: ExportedProgram) -> tuple[tuple[OutputLeaf, ...], list[str]]:
    """The leaves of the module's output, and the names of those that are tensors."""
    spec = exported.call_spec.out_spec
    count = spec.num_leaves
    paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(count)), spec))
    leaves: list[OutputLeaf] = []
    names: list[str] = []
    user = [s for s in exported.graph_signature.output_specs if s.kind is OutputKind.USER_OUTPUT]
    for (path, _), output in zip(paths, user, strict=True):
        if isinstance(output.arg, ConstantArgument):
            leaves.append(OutputLeaf(None, output.arg.value))
        elif isinstance(output.arg, TensorArgument):
            leaves.append(OutputLeaf(len(names)))
            steps = [step_name(step) for step in path]
            if spec.type is Handed and steps[0] == "output":  # where the output would stand alone
                steps = steps[1:]
            names.append(".".join(["output", *steps] if not steps or steps[0].isdigit() else steps))
        else:
            raise UnsupportedOutput(
                "the forward returns a size of its input as a number",
                because="a graph returns tensors, and constants that no input changes",
                help="return the tensor itself, or take its size outside of the module",
            )
    return tuple(leaves), names

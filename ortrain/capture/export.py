"""``capture``: one call of a module becomes one ONNX program.

::

    captured = capture(model, kwargs={"input_ids": ids, "labels": labels})
    captured.program          # the forward, parameters and buffers as inputs
    captured.accepts(shapes)  # may a call with these shapes use it?
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import onnx_ir as ir
import torch
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from ortrain.capture import exporter, fx, lift
from ortrain.capture.call import Call, example_call, step_name
from ortrain.capture.constraints import Constraints, Shapes, constraints_of
from ortrain.capture.origin import captured_error
from ortrain.capture.refusal import Refusal, assigning, refusal
from ortrain.capture.translations import TRANSLATIONS, recorded, translating
from ortrain.capture.untouched import uncollected, untouched, watched
from ortrain.errors import CaptureError
from ortrain.passes.clean import clean
from ortrain.program import Program, Role

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
            Outputs: the user's tensors, updated buffers.
        inputs: the user inputs of the program, in its order.
        dropped: tensors of the call that do not influence it; the program has no input for them.
        tensors: all tensors of the call, by position; the shapes of :meth:`accepts` are theirs.
        output_leaves: the leaves of the module's output, in pytree order.
        output_spec: the pytree of the module's output: ``output_spec.unflatten(leaves)``.
        constraints: which shapes the program is valid for.
        rung: how the module was captured: ``non-strict``, ``batch of 1 repeated``,
            ``batch or length of 1 repeated``, ``sizes of 1 kept symbolic``, ``strict``.
        failed: what was tried before, and why it did not work.
        seconds: what each part took.
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
        return pytree.tree_unflatten(leaves, self.output_spec)


@dataclass(frozen=True)
class _Rung:
    name: str
    dims: dict[int, dict[int, Any]]
    strict: bool = False
    oblivious: bool = False
    grown: frozenset[tuple[int, int]] = frozenset()  # axes of size 1 to repeat the example along


@dataclass
class _Exported:
    """An export that came about.

    Attributes:
        program: of torch.export.
        constraints: on the shapes.
        rung: how it was made.
        refused_shape: why the example itself cannot use it; empty if it can.
        fixes_batch: the leading dimensions that became constants.
        failed: what was tried before.
    """

    program: ExportedProgram
    constraints: Constraints
    rung: str
    refused_shape: str
    fixes_batch: str
    failed: tuple[str, ...] = ()


def capture(
    module: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    opset: int = 21,
) -> Captured:
    """Captures a module's forward, in its present mode, as an ONNX program.

    All dimensions of all tensors are symbolic as far as the module's code allows. Neither the
    module nor any random state changes.

    Args:
        module: in train or eval mode.
        args: example positional arguments: tensors, constants, and pytrees of them.
        kwargs: example keyword arguments.
        opset: of the standard ONNX domain. At 22 and above, onnxruntime lacks kernels for random
            draws.

    Raises:
        CaptureError: the module cannot become one graph; the error says where and why.
        UnsupportedInput: an argument is of a type that a graph cannot take.
    """
    exporter.check_version()
    _check_ambient_modes()
    watch = _Watch()
    state = lift.state_of(module)
    call = example_call(module, tuple(args), dict(kwargs or {}), taken=state.first)
    registry = _registry(opset)
    with uncollected(), untouched(module), torch.enable_grad():
        found = _export(module, call)
        exported = found.program
        watch.lap("export")
        updated = fx.clean(exported, registry.covers)
        watch.lap("clean-up of the ATen graph")
        model, seed = _translate(exported, registry, opset)
    watch.lap("translation")
    leaves, names = _outputs(exported)
    lift.finish_nodes(model)
    program = lift.lift(
        model, call, state, {b: node.name for b, node in updated.items()}, names, seed
    )
    clean(program)
    dropped = set(lift.drop_unused_inputs(program))
    for node in program.graph.all_nodes():
        node.name = node.outputs[0].name  # as profilers show it
    watch.lap("clean-up of the ONNX graph")
    tensors = tuple(UserInput(leaf.name, leaf.position) for leaf in call.tensors)
    by_name = {t.name: t for t in tensors}
    return Captured(
        program=program,
        inputs=tuple(by_name[v.name or ""] for v in program.inputs(Role.USER_INPUT)),
        dropped=tuple(t for t in tensors if t.name in dropped),
        tensors=tensors,
        output_leaves=leaves,
        output_spec=exported.call_spec.out_spec,
        constraints=found.constraints,
        rung=found.rung,
        failed=found.failed,
        seconds=watch.laps,
    )


class _Watch:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.since = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self.since
        self.since = now


_registries: dict[int, exporter.Registry] = {}


def _registry(opset: int) -> exporter.Registry:
    """Built once a process and opset."""
    if opset not in _registries:
        ours = {target: recorded(f, opset) for target, f in TRANSLATIONS.items()}
        _registries[opset] = exporter.Registry(opset, ours)
    return _registries[opset]


def _check_ambient_modes() -> None:
    devices = [d for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    if devices:
        raise CaptureError(
            f"autocast is on ({', '.join(devices)})",
            because="the exported graph does not record the casts of autocast",
            help="call the module outside of torch.autocast, or run it eagerly",
        )


# -- export --------------------------------------------------------------------------------------


def _rungs(call: Call) -> list[_Rung]:
    """What is tried, in order.

    A size of 1 is special to PyTorch (it may broadcast), so that the trace would fix it. Where it
    is a batch or a length of 1, the example is repeated along that axis before it is traced; the
    trace looks at no values. Only if that fails, PyTorch is asked to take 1 for any other size.
    """
    sizes = {leaf.position: leaf.value.shape for leaf in call.tensors}
    every = {p: {axis: Dim.AUTO for axis in range(len(s))} for p, s in sizes.items()}
    rungs = [_Rung("non-strict", every), _Rung("strict", every, strict=True)]
    batches, lengths = call.growable()
    if not batches and not lengths:
        return rungs
    grown = [_Rung("batch of 1 repeated", every, grown=frozenset(batches))] if batches else []
    if lengths:
        both = frozenset(batches | lengths)
        grown.insert(0, _Rung("batch or length of 1 repeated", every, grown=both))
    return [*grown, _Rung("sizes of 1 kept symbolic", every, oblivious=True), *rungs]


def _export(module: torch.nn.Module, call: Call) -> _Exported:
    """The first export whose graph can serve the call."""
    failed: list[str] = []
    first: Refusal | None = None
    for rung in _rungs(call):
        try:
            found = _attempt(module, call, rung)
        except Refusal as error:
            failed.append(f"{rung.name}: {error.because}")
            first = first or error
            if error.final:
                break
            continue
        if found.fixes_batch and not rung.strict:
            # Python such as len(tensor) turns a size into a number; Dynamo sees through it.
            with contextlib.suppress(Refusal):
                other = _attempt(module, call, replace(rung, name="strict", strict=True))
                if other.refused_shape == "" and not other.fixes_batch:
                    failed.append(f"{rung.name}: it would fix {found.fixes_batch}")
                    found = other
        if found.refused_shape:  # the example had been repeated, and the graph needs it so
            failed.append(f"{rung.name}: {found.refused_shape}")
            continue
        found.failed = tuple(failed)
        return found
    assert first is not None
    raise first.after(failed)


def _attempt(module: torch.nn.Module, call: Call, rung: _Rung) -> _Exported:
    example = call.grown(rung.grown)
    # Dynamo would trace the hook that watches.
    watching = contextlib.nullcontext([]) if rung.strict else watched(module)
    try:
        with watching as changed:
            program = exporter.export(
                module,
                example.args,
                example.kwargs,
                call.dynamic_shapes(rung.dims),
                strict=rung.strict,
                oblivious=rung.oblivious,
            )
    except Exception as error:
        raise refusal(module, error) from error
    if changed:
        raise assigning(changed)
    _unify_batch(program, example)
    constraints = _constraints(program, call)
    shapes = [tuple(leaf.value.shape) for leaf in call.tensors]
    fixed = [
        f"{constraints.names[i]}.shape[0]"
        for (i, axis) in constraints.static
        if axis == 0 and (shapes[i][0] != 1 or rung.grown)
    ]
    return _Exported(
        program, constraints, rung.name, constraints.why_not(shapes), ", ".join(fixed)
    )


def _tensor_shapes(exported: ExportedProgram, call: Call) -> dict[int, tuple[Any, ...]]:
    """The symbolic shape of each tensor of the call, by position."""
    nodes = {n.name: n for n in exported.graph.nodes if n.op == "placeholder"}
    specs = [s for s in exported.graph_signature.input_specs if s.kind.name == "USER_INPUT"]
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


def _constraints(exported: ExportedProgram, call: Call) -> Constraints:
    shapes = _tensor_shapes(exported, call)
    return constraints_of(
        [leaf.name for leaf in call.tensors],
        [shapes[leaf.position] for leaf in call.tensors],
        exported.range_constraints,
        exporter.guards(exported),
    )


# -- translation ---------------------------------------------------------------------------------


def _translate(
    exported: ExportedProgram, registry: exporter.Registry, opset: int
) -> tuple[ir.Model, ir.Value | None]:
    targets = fx.operators(exported.graph_module)
    missing = targets - registry.covers(targets)
    for node in exported.graph.nodes:
        if node.op == "call_function" and node.target in missing:
            raise captured_error(
                node,
                f"no translation to ONNX for {node.target}",
                because="neither ortrain nor PyTorch's exporter has one",
                help="replace the operator, or leave this module to eager",
            )
    with translating() as context:
        try:
            model = registry.translate(exported)
        except Exception as error:
            raise _translation_error(exported, error) from error
    exporter.make_standard(model, opset)
    model.ir_version = IR_VERSION
    return model, context.seed


def _translation_error(exported: ExportedProgram, error: BaseException) -> CaptureError:
    """The innermost reason, at the node whose translation failed."""
    name = exporter.failed_node(error)
    while error.__cause__ is not None:
        error = error.__cause__
    node = next((n for n in exported.graph.nodes if n.name == name), None)
    what = error.what if isinstance(error, CaptureError) else "an operator cannot be translated"
    because = (
        error.because if isinstance(error, CaptureError) else f"{type(error).__name__}: {error}"
    )
    help = error.help if isinstance(error, CaptureError) else ""
    if node is None:
        return CaptureError(what, because=because, help=help)
    if not isinstance(error, CaptureError):
        what = f"{node.target} cannot be translated to ONNX"
    return captured_error(node, what, because=because, help=help)


def _outputs(exported: ExportedProgram) -> tuple[tuple[OutputLeaf, ...], list[str]]:
    """The leaves of the module's output, and the names of those that are tensors."""
    spec = exported.call_spec.out_spec
    count = spec.num_leaves
    paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(count)), spec))
    leaves, names = [], []
    user = [s for s in exported.graph_signature.output_specs if s.kind is OutputKind.USER_OUTPUT]
    for (path, _), output in zip(paths, user, strict=True):
        if isinstance(output.arg, ConstantArgument):
            leaves.append(OutputLeaf(None, output.arg.value))
        elif isinstance(output.arg, TensorArgument):
            leaves.append(OutputLeaf(len(names)))
            steps = [step_name(step) for step in path]
            names.append(".".join(["output", *steps] if not steps or steps[0].isdigit() else steps))
        else:
            raise CaptureError(
                "the module returns a size of its input as a number",
                because="a graph returns tensors, and constants that no input changes",
                help="return the tensor itself, or torch.tensor(size)",
            )
    return tuple(leaves), names

"""A graph of ATen operators becomes a program: cleaned, translated, its inputs in order."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch.export.graph_signature import ConstantArgument, InputKind, TensorArgument
from torch.utils import _pytree as pytree

from ortrain.autodiff.decompose import DECOMPOSES
from ortrain.autodiff.engine import reachable
from ortrain.autodiff.registry import entry_of
from ortrain.capture import fx
from ortrain.capture.fx.kept import keep_operators
from ortrain.capture.onnx import lift
from ortrain.capture.onnx.doubles import refuse_rounded
from ortrain.capture.onnx.registry import Registry, failed_node, make_standard
from ortrain.capture.onnx.translations import TRANSLATIONS, recorded, translating
from ortrain.capture.onnx.translations.arithmetic import READING_FLOATS
from ortrain.capture.onnx.translations.base import Context, SymbolicSize, symbolic
from ortrain.capture.origin import (
    BESIDE,
    captured_error,
    located,
    operator_name,
    origin,
    own_reason,
)
from ortrain.capture.trace.call import Leaf, step_name
from ortrain.capture.trace.exact_numbers import is_made_of_sizes
from ortrain.capture.trace.exporter import quiet
from ortrain.capture.trace.keeping import keeper
from ortrain.capture.trace.refusal import first_line, named
from ortrain.capture.traced import Traced
from ortrain.errors import CaptureError, UnsupportedOutput
from ortrain.graph.shapes import FLOATING
from ortrain.graph.walk import reads
from ortrain.guards.handed import Handed
from ortrain.ops.base import DOMAIN
from ortrain.passes.clean import clean
from ortrain.passes.precision import place_casts
from ortrain.program import Check, Program
from ortrain.pytorch.autocast import Autocast

IR_VERSION = 10  # the first that has opset 21; runtimes of its time read it


@dataclass(frozen=True)
class OutputLeaf:
    """One leaf of the module's output.

    Attributes:
        output: index among the program's user outputs; None for a constant.
        constant: what the module returned where it is no tensor: None, a number, a string.
    """

    output: int | None
    constant: Any = None


_registries: dict[int, Registry] = {}


def registry_of(opset: int) -> Registry:
    """Built once a process and opset."""
    if opset not in _registries:
        ours = {target: recorded(f, opset) for target, f in TRANSLATIONS.items()}
        _registries[opset] = Registry(opset, ours)
    return _registries[opset]


class Watch:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.since = time.perf_counter()

    def lap(self, name: str) -> None:
        """Gives the time since the last lap a name."""
        now = time.perf_counter()
        self.laps[name] = now - self.since
        self.since = now


def program_of(
    traced: Traced,
    registry: Registry,
    leaves: Sequence[Leaf],
    state: lift.State,
    watch: Watch,
    checked: bool,
    autocast: Autocast,
    held: Mapping[str, str],
) -> Program:
    """The program of a graph; of its constants some are inputs, under other names."""
    with quiet():  # kept operators are tried on tensors without contents, and that may fail
        translated = _translate(traced, registry, watch, checked, autocast)
    _, names = outputs_of(traced)
    program = lift.lift(
        translated.model,
        leaves,
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


@dataclass(frozen=True)
class _Translated:
    model: ir.Model
    seed: ir.Value | None
    updated: dict[str, str]  # buffer → name of the value that updates it
    violations: str | None  # name of the value with the bits of the checks that do not hold
    checks: list[Check]


def _translate(
    traced: Traced,
    registry: Registry,
    watch: Watch,
    checked: bool,
    autocast: Autocast,
) -> _Translated:
    cleaned = fx.clean(traced, registry.covers, checked, autocast)
    watch.lap("clean-up of the ATen graph")
    missing = list(fx.missing(traced.module, registry.covers))
    keep = keeper()
    if keep is not None and keep.operators:
        missing = keep_operators(traced.module, missing, keep, "ortrain has no translation of it")
    for node in missing:
        name = operator_name(node.target)
        if refused := named(name, origin(node, full=True)):
            raise located(node, refused)
        if not isinstance(node.target, torch._ops.OpOverload):
            raise _located(node, symbolic(name))
        raise captured_error(
            node,
            f"no translation to ONNX for {name}",
            because="ortrain has none, and uses those of PyTorch's exporter only where they were "
            "seen to agree with PyTorch, gradients included",
            help=f"replace the operator by others; or {BESIDE}",
        )
    model, context = _in_onnx(traced, registry)
    if keep is not None and keep.operators and torch.is_grad_enabled():
        without = _without_gradient(traced, model)
        left = keep_operators(
            traced.module, without, keep, "what it is in ONNX has no gradient rule"
        )
        if len(left) < len(without):
            model, context = _in_onnx(traced, registry)
    model.ir_version = IR_VERSION
    refuse_rounded(model)
    lift.finish_nodes(model)
    watch.lap("translation")
    updated = {buffer: node.name for buffer, node in cleaned.updated.items()}
    violated = None if cleaned.violations is None else cleaned.violations.name
    return _Translated(model, context.seed, updated, violated, cleaned.checks)


def _in_onnx(traced: Traced, registry: Registry) -> tuple[ir.Model, Context]:
    """The model of a graph all of whose operators are covered, and what its parts share."""
    _check_floats(traced)
    while True:
        with translating() as context:
            try:
                model = registry.translate(traced)
                break
            except Exception as error:
                refused = _translation_error(traced, error)
                if not _kept_instead(traced, error, refused):
                    raise refused from error
    make_standard(model, registry.opset)
    return model, context


def _check_floats(traced: Traced) -> None:
    """Raises where an operator reads a float made of sizes that its translation may take amiss.

    ``torch.arange(0, size / 2)`` has a number of elements that is rounded up.
    """
    for node in traced.graph.nodes:
        if is_made_of_sizes(node.meta.get("val")):
            for user in node.users:
                if user.target not in READING_FLOATS:
                    what = f"{operator_name(user.target)} of a size that became a float"
                    raise _located(user, symbolic(what))


def _kept_instead(traced: Traced, error: Exception, refused: CaptureError) -> bool:
    """Whether an operator whose translation fails stays PyTorch's instead."""
    keep, name = keeper(), failed_node(error)
    if keep is None or not keep.operators or isinstance(refused, SymbolicSize):
        return False
    nodes = [n for n in traced.graph.nodes if n.name == name and n.op == "call_function"]
    because = refused.because or "ortrain has no translation of it in this form"
    return bool(nodes) and not keep_operators(traced.module, nodes, keep, because)


def _without_gradient(traced: Traced, model: ir.Model) -> list[torch.fx.Node]:
    """Operators between inputs and outputs of which some ONNX operator has no gradient rule."""
    parameters = set(traced.names(InputKind.PARAMETER))
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


def _translation_error(traced: Traced, error: BaseException) -> CaptureError:
    """The innermost reason, at the node whose translation failed."""
    name = failed_node(error)
    node = next((n for n in traced.graph.nodes if n.name == name), None)
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
    refused = kind(what, because=because, help=help)
    return refused if node is None else _located(node, refused)


def _located(node: torch.fx.Node, refused: CaptureError) -> CaptureError:
    """The error, with where its node comes from, and the values whose sizes it is about."""
    placed = located(node, refused)
    if isinstance(placed, SymbolicSize):
        placed.values = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
    return placed


def outputs_of(traced: Traced) -> tuple[tuple[OutputLeaf, ...], list[str]]:
    """The leaves of the module's output, and the names of those that are tensors."""
    spec = traced.spec
    count = spec.num_leaves
    paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(count)), spec))
    leaves: list[OutputLeaf] = []
    names: list[str] = []
    for (path, _), output in zip(paths, traced.outputs, strict=True):
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

"""A graph of ATen operators becomes a program: cleaned, translated, its inputs in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch

from ortrain.capture import fx
from ortrain.capture.call import Leaf
from ortrain.capture.onnx import lift
from ortrain.capture.onnx.doubles import refuse_rounded
from ortrain.capture.onnx.registry import NotTranslated, Registry
from ortrain.capture.onnx.translations import TRANSLATIONS, recorded, translating
from ortrain.capture.onnx.translations.arithmetic import READING_FLOATS
from ortrain.capture.onnx.translations.base import SymbolicSize, symbolic
from ortrain.capture.origin import (
    BESIDE,
    captured_error,
    located,
    operator_name,
    origin,
    own_reason,
)
from ortrain.capture.refusal import first_line, named
from ortrain.capture.traced import Traced
from ortrain.errors import CaptureError
from ortrain.passes.clean import clean
from ortrain.passes.precision import place_casts
from ortrain.program import Check, Program
from ortrain.pytorch.conditions import is_made_of_sizes
from ortrain.pytorch.operators import OpOverload

_registries: dict[int, Registry] = {}


def registry_of(opset: int) -> Registry:
    """Built once a process and opset."""
    if opset not in _registries:
        ours = {target: recorded(f, opset) for target, f in TRANSLATIONS.items()}
        _registries[opset] = Registry(opset, ours)
    return _registries[opset]


def program_of(
    traced: Traced, opset: int, leaves: Sequence[Leaf], state: lift.State, *, checked: bool
) -> Program:
    """The program of a graph, which is changed in place.

    Args:
        traced: the graph.
        opset: of the program.
        leaves: the graph's inputs that are the caller's.
        state: names of those that are parameters and buffers.
        checked: whether a call for which a check fails goes to PyTorch.

    Raises:
        CaptureError: an operator has no translation.
    """
    translated = _translate(traced, registry_of(opset), checked)
    count = len(traced.outputs)
    program = lift.lift(
        translated.model,
        leaves,
        state,
        translated.updated,
        ["output"] if count == 1 else [f"output.{i}" for i in range(count)],
        translated.seed,
        translated.violations,
        translated.checks,
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


def _translate(traced: Traced, registry: Registry, checked: bool) -> _Translated:
    cleaned = fx.clean(traced, registry.covers, checked)
    for node in fx.missing(traced.module, registry.covers):
        name = operator_name(node.target)
        if refused := named(name, origin(node, full=True)):
            raise located(node, refused)
        if not isinstance(node.target, OpOverload):
            raise _located(node, symbolic(name))
        raise captured_error(
            node,
            f"no translation to ONNX for {name}",
            because="ortrain has none, and uses those of PyTorch's exporter only where they were "
            "seen to agree with PyTorch, gradients included",
            help=f"replace the operator by others; or {BESIDE}",
        )
    model, seed = _in_onnx(traced, registry)
    refuse_rounded(model)
    lift.finish_nodes(model)
    updated = {buffer: node.name for buffer, node in cleaned.updated.items()}
    violated = None if cleaned.violations is None else cleaned.violations.name
    return _Translated(model, seed, updated, violated, cleaned.checks)


def _in_onnx(traced: Traced, registry: Registry) -> tuple[ir.Model, ir.Value | None]:
    """The model of a graph all of whose operators are covered, and its seed if it draws."""
    _check_floats(traced)
    with translating() as shared:
        try:
            return registry.translate(traced, shared), shared.seed
        except NotTranslated as error:
            raise _translation_error(error) from error


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


def _translation_error(failed: NotTranslated) -> CaptureError:
    """The innermost reason, at the node whose translation failed."""
    node, error = failed.node, failed.__cause__
    assert error is not None
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, CaptureError):
        because, help = error.because, error.help
        return _located(node, type(error)(error.what, because=because, help=help))
    because = own_reason(error, "translating it") or (
        f"its translation fails with {type(error).__name__}: {first_line(error)}"
    )
    return _located(
        node,
        CaptureError(
            f"{operator_name(node.target)} cannot be translated to ONNX in this form",
            because=because,
            help=f"replace the operator by others; or {BESIDE}",
        ),
    )


def _located(node: torch.fx.Node, refused: CaptureError) -> CaptureError:
    """The error, with where its node comes from, and the values whose sizes it is about."""
    placed = located(node, refused)
    if isinstance(placed, SymbolicSize):
        placed.values = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
    return placed

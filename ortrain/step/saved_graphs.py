"""The graphs of a step as ONNX files: as they run, and whole at each stage on the way there."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from ortrain.autodiff.engine import differentiate
from ortrain.config import DebugOptions
from ortrain.errors import OrtrainWarning, SaveError
from ortrain.files.replacing import staged
from ortrain.passes import rewrite
from ortrain.program import Program
from ortrain.runtime.base import Executor
from ortrain.step.build import Plan

_told: set[Path] = set()


def save_pieces(debug: DebugOptions, plan: Plan) -> None:
    """Writes the forward and each piece of the backward, before and after lowering.

    Args:
        debug: names and folder.
        plan: of a step.
    """
    names = ["forward", *(f"backward_{i + 1}" for i in range(len(plan.pieces)))]
    for name, before, after in zip(names, plan.programs, plan.lowered, strict=True):
        mode = "training" if plan.pieces else "inference"
        _save(debug, f"{name}_{mode}", before)
        _save(debug, f"{name}_lowered_{mode}", after)


def save_stages(
    debug: DebugOptions,
    trains: bool,
    captured: Program,
    program: Program,
    wrt: Sequence[str],
    outputs: Sequence[str],
    executor: Executor,
    sizes: Mapping[str, int],
) -> None:
    """Writes the whole graph at each stage, by the names of ONNX Runtime Training.

    There forward and backward ran as one graph. Here they are cut, and the whole is made for its
    file alone. Of a module in evaluation it has no gradients.

    Args:
        debug: names and folder.
        trains: whether the module is in training mode, and gradients are asked for.
        captured: the module.
        program: what is differentiated of it.
        wrt: names of the inputs that require a gradient.
        outputs: names of the outputs that receive one.
        executor: what runs the step.
        sizes: example value of each symbolic dimension.
    """
    whole = program.clone()
    if trains:
        whole = differentiate(program, wrt, outputs, keep=executor.keeps, sizes=dict(sizes))
        rewrite(whole, "training")
    mode = "training" if trains else "inference"
    _save(debug, f"torch_exported_{mode}", captured)
    _save(debug, f"optimized_pre_grad_{mode}", program)
    _save(debug, f"optimized_{mode}", whole)
    _save(debug, f"execution_model_{mode}", executor.lower(whole))


def _save(debug: DebugOptions, name: str, program: Program) -> None:
    """Writes a graph; where that fails, one warning a folder says so, and the step runs on."""
    target = debug.folder / f"{debug.onnx_prefix}_{name}.onnx"
    try:
        with staged(target.parent, target.name, "graph") as folder:
            program.save(folder / target.name)
    except SaveError as error:
        if target.parent not in _told:
            _told.add(target.parent)
            warnings.warn(f"save_onnx=True: {error}", OrtrainWarning, stacklevel=2)

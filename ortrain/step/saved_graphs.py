"""The graphs of a step as ONNX files: as they run, and whole at each stage on the way there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ortrain.autodiff.engine import differentiate
from ortrain.config import DebugOptions
from ortrain.passes import rewrite
from ortrain.program import Program
from ortrain.runtime.base import Executor
from ortrain.step.build import Plan


def save_pieces(debug: DebugOptions, plan: Plan) -> None:
    """Writes the forward and each piece of the backward, before and after lowering.

    Args:
        debug: names and folder.
        plan: of a step.
    """
    names = ["forward", *(f"backward_{i + 1}" for i in range(len(plan.pieces)))]
    for name, before, after in zip(names, plan.programs, plan.lowered, strict=True):
        _save(debug, plan, name, before)
        _save(debug, plan, f"{name}_lowered", after)


def save_stages(
    debug: DebugOptions,
    plan: Plan,
    captured: Program,
    program: Program,
    wrt: Sequence[str],
    outputs: Sequence[str],
    executor: Executor,
    sizes: Mapping[str, int],
) -> None:
    """Writes the whole graph at each stage, by the names of ONNX Runtime Training.

    There forward and backward ran as one graph. Here they are cut, and the whole is made for its
    file alone.

    Args:
        debug: names and folder.
        plan: of the step.
        captured: the module.
        program: what is differentiated of it.
        wrt: names of the inputs that require a gradient.
        outputs: names of the outputs that receive one.
        executor: what runs the step.
        sizes: example value of each symbolic dimension.
    """
    whole = program.clone()
    if plan.pieces:
        whole = differentiate(program, wrt, outputs, keep=executor.keeps, sizes=dict(sizes))
        rewrite(whole, "training")
    _save(debug, plan, "torch_exported", captured)
    _save(debug, plan, "optimized_pre_grad", program)
    _save(debug, plan, "optimized", whole)
    _save(debug, plan, "execution_model", executor.lower(whole))


def _save(debug: DebugOptions, plan: Plan, name: str, program: Program) -> None:
    mode = "training" if plan.pieces else "inference"
    debug.folder.mkdir(parents=True, exist_ok=True)
    program.save(debug.folder / f"{debug.onnx_prefix}_{name}_{mode}.onnx")

"""``explain``: what a module becomes, what it costs, and how closely it agrees with eager."""

from __future__ import annotations

from ortrain.extras import require

require("torch", __name__)

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ortrain.capture.call import step_name
from ortrain.config import EXECUTORS, Engine, Options
from ortrain.errors import OrtrainError, listing
from ortrain.kinds import expect
from ortrain.module import ORTModule, autocast_of, expect_options, unwrap
from ortrain.pytorch import pytree
from ortrain.pytorch.autocast import active
from ortrain.runtime.engines import are_narrow
from ortrain.step.memory import StepMemory

if TYPE_CHECKING:
    from ortrain.frontend.graph import Graph

# Agreement that float32 kernels of two libraries reach; what is above is marked.
TOLERANCE = 1e-4


@dataclass
class Explanation:
    """A report on one module and one batch. Of several graphs each has its number before its names.

    Attributes:
        name: class of the module.
        reason: why it does not run as a graph; empty where it does.
        stages: seconds of each stage.
        programs: name → (nodes before lowering, nodes after it, operators after it).
        sources: name → the function that the program runs as, where its engine has one to show.
        saved_bytes: kept between forward and backward.
        memory: what a training step holds, for these inputs and others, of several graphs the one
            that holds most; None without gradients.
        where: what runs where, a sentence each.
        parity: output, parameter or buffer → difference from eager with the same random numbers,
            root mean square, relative to that of the values.
    """

    name: str
    reason: str = ""
    stages: dict[str, float] = field(default_factory=dict)
    programs: dict[str, tuple[int, int, Counter[str]]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    saved_bytes: int = 0
    memory: StepMemory | None = None
    where: list[str] = field(default_factory=list)
    parity: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [f"{self.name}", ""]
        rows += ["what runs where", *(f"  {line}" for line in self.where), ""]
        if self.stages:
            rows.append("seconds by stage")
            rows += [f"  {stage:<16}{seconds:8.3f}" for stage, seconds in self.stages.items()]
            rows.append(f"  {'in all':<16}{sum(self.stages.values()):8.3f}")
            rows.append("")
        for title, (before, after, operators) in self.programs.items():
            common = ", ".join(f"{name} {count}" for name, count in operators.most_common(8))
            rows.append(f"{title}: {before} nodes, {after} after lowering ({common})")
        if self.memory is not None:
            rows += ["", str(self.memory)]
        if self.parity:
            rows += ["", "difference from eager (root mean square, relative to the values)"]
            worst = sorted(self.parity.items(), key=lambda item: -item[1])
            for name, error in worst[:8]:
                mark = "  <-- above 1e-4" if error > TOLERANCE else ""
                rows.append(f"  {name:<48}{error:10.1e}{mark}")
            if len(worst) > 8:
                rows.append(f"  and {len(worst) - 8} more, all below")
        for title, source in self.sources.items():
            rows += ["", f"# {title}", source]
        return "\n".join(rows)


def explain(
    model: nn.Module, *args: Any, options: Options | None = None, **kwargs: Any
) -> Explanation:
    """Captures and differentiates a module for these inputs, and compares it with eager.

    The module is left as it is: gradients, buffers and the random state are untouched.

    Args:
        model: a module, or an ORTModule around one.
        args: positional arguments of one call.
        options: as for ORTModule; by default those of an ORTModule that is given. For an engine
            that runs no graph, and for ``"auto"``, stands ``"aten"`` in mixed or reduced precision
            and onnxruntime else.
        kwargs: keyword arguments of one call.

    Returns:
        The explanation; ``print`` it.

    Raises:
        TypeError: ``model`` is no module, or ``options`` are none.
    """
    expect("model", model, nn.Module, "a torch.nn.Module")
    expect_options(None, options)
    module = unwrap(model)
    asked = options or (model.options if isinstance(model, ORTModule) else Options())
    reduced = active() or asked.precision or are_narrow({p.dtype for p in module.parameters()})
    usual: Engine = "aten" if reduced else "onnxruntime"
    engine: Engine = asked.engine if asked.engine in EXECUTORS else usual
    chosen = replace(asked, engine=engine, fallback="raise", certificate="first")
    result = Explanation(type(module).__name__)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        wrapped = ORTModule(copy.deepcopy(module), options=chosen)
        machine, ran, output = wrapped._runner, [], None
        try:
            wrapped(*args, **kwargs)
            # Once more: behind that the module itself has been compared, and outputs have names.
            with autocast_of(chosen, machine.module, args, kwargs):
                outcome = machine.graphs.whole(
                    engine, args, kwargs, "all", may_convert=True, may_part=lambda: True
                )
            if outcome.why is not None:
                raise outcome.why
            ran, output = outcome.ran, outcome.output
        except OrtrainError as error:
            result.reason = str(error)
            result.where = [f"everything in PyTorch: {error}"]
    graphs = [] if machine.graphs is None else machine.graphs.last.graphs
    for number, graph in enumerate(graphs, 1):
        prefix = f"graph {number}: " if len(graphs) > 1 else ""
        results = next((found for each, found in ran if each is graph), ())
        names = _names_of(output, [results] if graph.alone else results)
        if (found := graph.form.certificate) is not None:
            differences = found.differences.items()
            result.parity |= {prefix + names.get(name, name): each for name, each in differences}
        if not result.reason:
            _describe(result, graph, prefix)
    if not result.reason:
        report = wrapped.report
        result.stages, result.saved_bytes = dict(report.stages), report.saved_bytes
        result.where = [f"forward and backward in {report.engine}", "optimizer in PyTorch"]
        given = {name for graph in graphs for name in graph.step.plan.wrt}
        unused = {n for n, p in module.named_parameters() if p.requires_grad} - given
        if unused:
            of = listing(sorted(unused))
            result.where.append(f"no gradient for {len(unused)} parameters: {of}")
    return result


def _names_of(output: Any, results: Sequence[Any]) -> dict[str, str]:
    """What the module calls the results of a graph that it returns as they are."""
    leaves, _ = pytree.tree_flatten_with_path(output)
    known = {id(leaf): ".".join(map(step_name, path)) or "output" for path, leaf in leaves}
    return {f"output {i}": known[id(t)] for i, t in enumerate(results) if id(t) in known}


def _describe(result: Explanation, graph: Graph, prefix: str) -> None:
    """Adds what one of the graphs is."""
    plan, form = graph.step.plan, graph.form
    if plan.pieces:
        memory = StepMemory(
            plan.programs, form.sizes, _none if form.tokens is None else form.tokens.most
        )
        if result.memory is None or memory.peak() > result.memory.peak():
            result.memory = memory
    names = [
        prefix + name
        for name in ("forward", *(f"backward {i + 1}" for i in range(len(plan.pieces))))
    ]
    for name, before, after in zip(names, plan.programs, plan.lowered, strict=True):
        result.programs[name] = len(before.graph), len(after.graph), after.operators()
    compiled = [plan.forward, *(piece.compiled for piece in plan.pieces)]
    result.sources |= {n: c.source for n, c in zip(names, compiled, strict=True) if c.source}


def _none(sizes: Mapping[str, int]) -> dict[str, int]:
    return {}

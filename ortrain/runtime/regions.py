"""Programs that several executors run: each node goes to the first that claims it.

The nodes that one executor runs in a row are a *region*. Regions exchange tensors over the same
memory. So a program may have a node that one executor alone can run, and the rest elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from ortrain.autodiff.partition import extract
from ortrain.errors import ExecutionError
from ortrain.graph.walk import reads
from ortrain.ops import expand
from ortrain.ops.base import DOMAIN
from ortrain.passes.clean import clean
from ortrain.program import Program, origin_of
from ortrain.runtime.aten.exchange import Tensors
from ortrain.runtime.base import Compiled, Exchange, Executor
from ortrain.runtime.memory import Ceiling

ENGINE = "ortrain.engine"


@dataclass(frozen=True)
class Stage:
    """One region, ready to run.

    Attributes:
        engine: that runs it.
        compiled: the program.
        exchange: of tensors with it.
        takes: slots of its inputs.
        gives: slots of its outputs.
        bools: which of its outputs are bool.
        frees: slots that no later stage takes.
    """

    engine: str
    compiled: Compiled
    exchange: Exchange
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    bools: tuple[int, ...]
    frees: tuple[int, ...]


@dataclass(frozen=True)
class RegionsCompiled:
    """A row of stages over slots that hold tensors.

    Attributes:
        stages: in the order in which they run.
        slots: how many there are.
        inputs: how many of them, the first, are the program's inputs.
        results: slots of the program's outputs.
    """

    stages: tuple[Stage, ...]
    slots: int
    inputs: int
    results: tuple[int, ...]

    @property
    def source(self) -> str:
        """Of the stages that have one."""
        parts = [f"# {stage.engine}\n{stage.compiled.source}".rstrip() for stage in self.stages]
        return "\n\n".join(parts)

    def run_values(self, feeds: list[Any]) -> list[Any]:
        """Runs on tensors in input order."""
        slots: list[Any] = [*feeds, *([None] * (self.slots - len(feeds)))]
        feeds.clear()
        for stage in self.stages:
            exchange = stage.exchange
            values = [exchange.take(slots[i]) for i in stage.takes]
            for i in stage.frees:
                slots[i] = None
            made = exchange.all(stage.compiled.run_values(values), stage.bools)
            for i, tensor in zip(stage.gives, made, strict=True):
                slots[i] = tensor
        given = set(range(self.inputs))
        results = []
        for i in self.results:
            results.append(slots[i].clone() if i in given else slots[i])
            given.add(i)
        return results

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Runs on numpy arrays in input order."""
        import torch

        return [t.numpy() for t in self.run_values([torch.from_numpy(np.array(i)) for i in inputs])]


class RegionsExecutor:
    """Gives each node to the first of several executors that claims it.

    Args:
        executors: in order of preference.

    Attributes:
        name: their names.
    """

    replays = None
    ceiling: Ceiling | None = None

    def __init__(self, executors: Sequence[Executor]) -> None:
        self.executors = {executor.name: executor for executor in executors}
        self.name = "+".join(self.executors)
        self.frees = all(executor.frees for executor in executors)

    def __str__(self) -> str:
        return " and ".join(map(str, self.executors.values()))

    def __repr__(self) -> str:
        return f"RegionsExecutor({[*self.executors.values()]!r})"

    @property
    def exchange(self) -> Exchange:
        """Tensors are what goes from region to region."""
        return Tensors

    def keeps(self, node: ir.Node) -> bool:
        """What any of them has something better for."""
        return any(executor.keeps(node) for executor in self.executors.values())

    def cheap(self, node: ir.Node) -> bool:
        """What is cheap for each of them."""
        return all(executor.cheap(node) for executor in self.executors.values())

    def claims(self, node: ir.Node) -> bool:
        """Whether any of them runs it."""
        return self._claimant(node) is not None

    def _claimant(self, node: ir.Node) -> str | None:
        return next((name for name, e in self.executors.items() if e.claims(node)), None)

    def lower(self, program: Program) -> Program:
        """A copy of the program in which every node says who runs it.

        Raises:
            ExecutionError: nobody runs a node.
        """
        result = program.clone()
        expand(
            result.graph,
            opset=result.opset,
            only=lambda node: node.domain == DOMAIN and not self.claims(node),
        )
        clean(result)
        LiftConstantsToInitializersPass(size_limit=0)(result.model)
        for node in result.graph:
            engine = self._claimant(node)
            if engine is None:
                raise ExecutionError(
                    f"neither {' nor '.join(self.executors)} runs {node.op_type!r}",
                    where=origin_of(node),
                )
            node.metadata_props[ENGINE] = engine
        result.name_values()
        return result

    def compile(self, program: Program) -> RegionsCompiled:
        """Makes a stage of each region."""
        graph = program.graph
        slot: dict[ir.Value, int] = {value: i for i, value in enumerate(graph.inputs)}
        rows = []
        for engine, nodes in regions(graph):
            made = [v for n in nodes for v in n.outputs]
            inside = set(nodes)
            outside = {v for n in graph if n not in inside for v in reads(n)}
            given = [v for v in made if v.is_graph_output() or v in outside]
            part = extract(program, nodes, [], given)
            by_name = {value.name: value for value in slot}
            takes = [by_name[v.name] for v in part.graph.inputs]
            for value in given:
                slot[value] = len(slot)
            executor = self.executors[engine]
            lowered = executor.lower(part)
            bools = [i for i, v in enumerate(given) if v.dtype is ir.DataType.BOOL]
            rows.append((engine, executor.compile(lowered), executor.exchange, takes, given, bools))
        last = {slot[v]: i for i, row in enumerate(rows) for v in row[3]}
        kept = {slot[v] for v in graph.outputs if v in slot}
        stages = tuple(
            Stage(
                engine,
                compiled,
                exchange,
                tuple(slot[v] for v in takes),
                tuple(slot[v] for v in given),
                tuple(bools),
                tuple(s for s, at in last.items() if at == i and s not in kept),
            )
            for i, (engine, compiled, exchange, takes, given, bools) in enumerate(rows)
        )
        return RegionsCompiled(
            stages, len(slot), len(graph.inputs), tuple(slot[v] for v in graph.outputs)
        )


def regions(graph: ir.Graph) -> Iterator[tuple[str, list[ir.Node]]]:
    """The regions of a graph, in an order in which they can run.

    A node waits for its executor's next turn while another's nodes can run, so that there are few.
    """
    left = list(graph)
    made: set[ir.Value] = set()
    produced = {v for n in left for v in n.outputs}
    engine = left[0].metadata_props[ENGINE] if left else ""
    while left:
        region: list[ir.Node] = []
        waiting: list[ir.Node] = []
        for node in left:
            ready = all(v in made or v not in produced for v in reads(node))
            if ready and node.metadata_props[ENGINE] == engine:
                region.append(node)
                made.update(node.outputs)
            else:
                waiting.append(node)
        if region:
            yield engine, region
        left = waiting
        if left:
            engine = next(
                n.metadata_props[ENGINE]
                for n in left
                if all(v in made or v not in produced for v in reads(n))
            )

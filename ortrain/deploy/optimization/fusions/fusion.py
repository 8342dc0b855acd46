"""What a fusion is, how fusions are run over a model, and what they report."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from ortrain.deploy.optimization.configuration import OptimizationConfig
from ortrain.errors import OrtrainWarning
from ortrain.graph.build import Builder
from ortrain.graph.rewire import take_place
from ortrain.program import PHASE

# What a kernel of onnxruntime's for the fused operators computes, on a processor or on CUDA. A
# float64 has none, and bfloat16 rounds in other places than the spelled-out operators do.
DTYPES = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16})


class Refused(Exception):
    """A pattern that cannot be shown to compute what the operator does; the message says why."""


@dataclass
class Report:
    """What the fusions have done to one file.

    Attributes:
        fused: operators that came in → how many.
        refused: (fusion, name of a value, reason): patterns that stay as they are.
    """

    fused: Counter[str] = field(default_factory=Counter)
    refused: list[tuple[str, str, str]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        refused = [{"fusion": f, "value": v, "reason": r} for f, v, r in self.refused]
        return {"fused": dict(self.fused), "refused": refused}


class Place:
    """A graph, and what the fusions of one pass over it share.

    Args:
        model: that the graph is of.
        graph: itself, or a body of an ``If``, a ``Loop`` or a ``Scan``.
        config: what is asked for.
    """

    def __init__(self, model: ir.Model, graph: ir.Graph, config: OptimizationConfig) -> None:
        self.model, self.graph, self.config = model, graph, config
        self.opset = model.opset_imports.get("", 1)
        self._constants: dict[tuple[Any, ...], ir.Value] = {}
        self._made: dict[Hashable, Any] = {}
        self.fused: Counter[str] = Counter()

    def builder(self, node: ir.Node) -> Builder:
        """Puts nodes before one of the graph."""
        return Builder.before(node, opset=self.opset, constants=self._constants)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What is made for the first node that needs it, and serves those behind it too.

        Nodes are visited in their order, so that what the first one needs is ready for all others.
        """
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def replace(self, old: ir.Value, new: ir.Value, fused: str = "") -> None:
        """Puts one value in another's place.

        Args:
            old: whose node can go afterwards.
            new: that nobody else has made yet.
            fused: the operator that has come in, for the report.
        """
        take_place(new, old)
        if fused:
            self.fused[fused] += 1

    def initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        """A weight of the graph that is made of others, under a name that is free."""
        free, count = name, 0
        while free in self.graph.initializers:
            count += 1
            free = f"{name}.{count}"
        shape = ir.Shape(tensor.shape.numpy())
        value = ir.Value(
            name=free, shape=shape, type=ir.TensorType(tensor.dtype), const_value=tensor
        )
        self.graph.register_initializer(value)
        return value


@dataclass(frozen=True)
class Fusion:
    """A rewrite of what one operator ends into one that computes the same.

    Attributes:
        name: for the report.
        anchors: (domain, operator) of the nodes that a pattern ends with.
        apply: makes the rewrite for such a node and tells whether it has; raises Refused where the
            pattern is there, and may not be replaced.
        enabled: whether a configuration asks for it.
    """

    name: str
    anchors: frozenset[tuple[str, str]]
    apply: Callable[[Place, ir.Node], bool]
    enabled: Callable[[OptimizationConfig], bool]


def graphs(model: ir.Model) -> Iterator[ir.Graph]:
    """A model's graph, and the bodies in it."""
    yield model.graph
    for node in model.graph.all_nodes():
        for attribute in node.attributes.values():
            if attribute.type is ir.AttributeType.GRAPH:
                yield attribute.as_graph()
            elif attribute.type is ir.AttributeType.GRAPHS:
                yield from attribute.as_graphs()


def run(model: ir.Model, fusions: Sequence[Fusion], config: OptimizationConfig) -> Report:
    """Makes the fusions that a configuration asks for, in place and in this order."""
    report = Report()
    for fusion in fusions:
        if not fusion.enabled(config):
            continue
        for graph in list(graphs(model)):
            place = Place(model, graph, config)
            for node in list(graph):
                if (node.domain, node.op_type) not in fusion.anchors or node.graph is not graph:
                    continue
                if not any(v.uses() or v.is_graph_output() for v in node.outputs):
                    continue  # another one has taken its place
                try:
                    fusion.apply(place, node)
                except Refused as refusal:
                    report.refused.append((fusion.name, _name(node), str(refusal)))
                except Exception as error:
                    # A pattern stays as it was until all that replaces it stands.
                    told = f"{type(error).__name__}: {error}"
                    report.refused.append((fusion.name, _name(node), f"failed with {told}"))
                    warnings.warn(
                        f"the fusion {fusion.name!r} failed at {_name(node)} with {told}; the "
                        "nodes stay as they are. Please report the model",
                        OrtrainWarning,
                        stacklevel=3,
                    )
            report.fused += place.fused
            # What stood before a body may have been read there alone.
            for each in reversed(list(graphs(model))):
                remove_unread(each)
            # What is shared by several stands before the first that was found, wherever that is.
            graph.sort()
    make_distinct(model)
    for node in model.graph.all_nodes():
        node.metadata_props.pop(PHASE, None)
        if node.domain:
            model.opset_imports.setdefault(node.domain, 1)
    return report


def make_distinct(model: ir.Model) -> None:
    """Gives values other names that have those of others: what goes in and out keeps its own.

    What is put in is named for the node that it stands before, and so were nodes of a file that
    was written in the same way.
    """
    taken: set[str] = set()
    for graph in graphs(model):
        taken.update(v.name for v in (*graph.inputs, *graph.outputs) if v.name)
        taken.update(graph.initializers)
    for node in model.graph.all_nodes():
        for value in node.outputs:
            if not value.name or value.is_graph_output():
                continue
            name, count = value.name, 0
            while name in taken:
                count += 1
                name = f"{value.name}.{count}"
            value.name = name
            taken.add(name)


def _name(node: ir.Node) -> str:
    return node.outputs[0].name or node.name or node.op_type


def remove_unread(graph: ir.Graph) -> None:
    """Removes nodes whose values nobody reads, and weights likewise."""
    for node in reversed(list(graph)):
        if not any(v.uses() or v.is_graph_output() for v in node.outputs):
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
            del graph.initializers[name]

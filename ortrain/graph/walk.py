"""Walks over a graph that do not forget what sub-graphs read from outside."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir


def reads(node: ir.Node) -> list[ir.Value]:
    """A node's inputs, with the values that its sub-graphs capture from outside."""
    direct = [v for v in node.inputs if v is not None]
    for attribute in node.attributes.values():
        if attribute.type is ir.AttributeType.GRAPH:
            inner = attribute.as_graph()
            own = set(inner.inputs) | {v for n in inner.all_nodes() for v in n.outputs}
            own |= set(inner.initializers.values())
            direct += [
                v for n in inner.all_nodes() for v in n.inputs if v is not None and v not in own
            ]
    return direct


def only_reader(value: ir.Value) -> ir.Node | None:
    """The one node that reads a value; None where it is in a sub-graph, which stays as it is."""
    uses = list(value.uses())
    alone = len(uses) == 1 and not value.is_graph_output() and uses[0].node.graph is value.graph
    return uses[0].node if alone else None


def dependencies(
    graph: ir.Graph, outputs: Iterable[ir.Value], *, sizes: bool = True
) -> set[ir.Value]:
    """All values that these are computed from, and they themselves.

    Args:
        graph: that computes them.
        outputs: of it.
        sizes: whether those count of which nothing but sizes is read.
    """
    found = set(outputs)
    for node in reversed(graph):
        if any(v in found for v in node.outputs) and (sizes or node.op_type not in SIZES):
            found.update(reads(node))
    return found


SIZES = ("Shape", "Size")

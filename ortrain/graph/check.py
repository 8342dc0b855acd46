"""Invariants of a graph that every stage relies on."""

from __future__ import annotations

import onnx_ir as ir

from ortrain.errors import GraphError
from ortrain.graph.walk import reads


def check(graph: ir.Graph, after: str) -> None:
    """Checks that each value is made once, before it is read, under a name of its own.

    Args:
        graph: the graph.
        after: the stage or pass that made it, for the message.

    Raises:
        GraphError: naming the value, the node and the pass.
    """
    made: set[ir.Value] = {*graph.inputs, *graph.initializers.values()}
    names: dict[str, ir.Value] = {}
    for value in made:
        _own_name(names, value, after)
    for node in graph:
        for value in reads(node):
            if value not in made:
                raise GraphError(
                    f"{after}: {node.op_type} reads {value.name!r} before it is made",
                    where=node.outputs[0].name or "",
                    help="report this: a pass must keep the nodes in order",
                )
        for value in node.outputs:
            made.add(value)
            if value.name:
                _own_name(names, value, after)
    for value in graph.outputs:
        if value not in made:
            raise GraphError(f"{after}: nothing makes the output {value.name!r}")


def _own_name(names: dict[str, ir.Value], value: ir.Value, after: str) -> None:
    other = names.setdefault(value.name or "", value)
    if other is not value:
        raise GraphError(f"{after}: two values are named {value.name!r}")

"""Whether an output may lie in the memory of an input: each element is read before it is written.

Nodes run in any order that the edges of the graph allow. So ``x.updated`` may take the memory of
``x`` only if every node that reads ``x`` must run before the node that writes ``x.updated``, or is
that node and reads ``x`` only at the position that it writes next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from ortrain.errors import GraphError
from ortrain.graph import shapes
from ortrain.graph.walk import reads

# Write an element of the output after they have read their inputs at that position, and nowhere
# else; an input that is broadcast is not read so.
_ELEMENTWISE = {
    "Abs", "Add", "And", "Cast", "Ceil", "Clip", "Cos", "Div", "Equal", "Erf", "Exp", "Floor",
    "Greater", "HardSigmoid", "Less", "Log", "Max", "Min", "Mul", "Neg", "Not", "Or", "PRelu",
    "Pow", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Sqrt", "Sub", "Tanh", "Where",
}  # fmt: skip
# Their output may be their input's memory under another shape.
_VIEWS = {"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"}


def check_aliases(graph: ir.Graph, aliases: Mapping[str, str]) -> None:
    """Checks that each output can be written where its input lies, in whatever order nodes run.

    Args:
        graph: of the standard domain, its nodes in order.
        aliases: output name → name of the input whose memory it may take.

    Raises:
        GraphError: naming the pair and the node in the way.
    """
    inputs = {value.name: value for value in graph.inputs}
    outputs = {value.name: value for value in graph.outputs}
    before = _ancestors(graph)
    for output, source in aliases.items():
        if output not in outputs or source not in inputs:
            raise GraphError(f"{output!r} may take the memory of {source!r}, and one is missing")
        obstacle = _obstacle(graph, before, inputs[source], outputs[output])
        if obstacle is not None:
            node, reason = obstacle
            raise GraphError(
                f"{output!r} cannot be written where {source!r} lies",
                where=f"{node.op_type} {node.outputs[0].name!r}",
                because=reason,
                help="let what writes it depend on every node that reads the old value",
            )


def _ancestors(graph: ir.Graph) -> dict[ir.Node, int]:
    """For each node, a bit for every node that must run before it, and its own."""
    before: dict[ir.Node, int] = {}
    for index, node in enumerate(graph):
        bits = 1 << index
        for value in reads(node):
            producer = value.producer()
            if producer is not None:
                bits |= before.get(producer, 0)
        before[node] = bits
    return before


def _obstacle(
    graph: ir.Graph, before: dict[ir.Node, int], source: ir.Value, target: ir.Value
) -> tuple[ir.Node, str] | None:
    """The node, and the reason, for which ``target`` cannot be written where ``source`` lies."""
    writer = target.producer()
    while writer is not None and writer.op_type == "Identity" and writer.inputs[0] is not source:
        # A runtime leaves it out, and what it copies is written there directly.
        (copied,) = writer.inputs
        writer = None if copied is None else copied.producer()
        target = target if copied is None else copied
    if writer is None or writer not in before:
        return None
    same = _views(graph, source)
    for index, node in enumerate(graph):
        if node is not writer and not before[writer] >> index & 1 and _meets(reads(node), same):
            return node, "it reads the old value, and may run after the new one is written"
    if not _meets(reads(writer), same):
        return None
    if writer.op_type in _VIEWS:
        return None
    if writer.op_type in _ELEMENTWISE:
        shape = shapes.dims(target)
        for value in writer.inputs:
            if value in same and (shape is None or None in shape or shapes.dims(value) != shape):
                return writer, "it reads the old value at other positions than it writes"
        return None
    if writer.op_type == "If":
        return _in_branches(writer, source, target, same)
    if writer.op_type == "Scan":
        return _in_body(writer, target, same)
    return writer, "it writes the new value while it reads the old one"


def _meets(values: Iterable[ir.Value], same: set[ir.Value]) -> bool:
    return any(value in same for value in values)


def _views(graph: ir.Graph, source: ir.Value) -> set[ir.Value]:
    """The value, and what may be its memory under another shape."""
    same = {source}
    for node in graph:
        if node.op_type in _VIEWS and node.inputs[0] in same:
            same.add(node.outputs[0])
    return same


def _in_branches(
    writer: ir.Node, source: ir.Value, target: ir.Value, same: set[ir.Value]
) -> tuple[ir.Node, str] | None:
    """``If``: the rule holds in either branch, which captures the old value."""
    if writer.inputs[0] in same:
        return writer, "the old value is its condition"
    position = list(writer.outputs).index(target)
    for name in ("then_branch", "else_branch"):
        branch = writer.attributes[name].as_graph()
        before = _ancestors(branch)
        for captured in same:
            found = _obstacle(branch, before, captured, branch.outputs[position])
            if found is not None:
                return found
    return None


def _in_body(writer: ir.Node, target: ir.Value, same: set[ir.Value]) -> tuple[ir.Node, str] | None:
    """``Scan``: an iteration reads and writes one and the same slice, and the rule holds in it."""
    body = writer.attributes["body"].as_graph()
    read = [i for i, value in enumerate(writer.inputs) if value in same]
    written = list(writer.outputs).index(target)
    states = len(writer.inputs) - writer.attributes["num_scan_inputs"].as_int()
    ordered = {name for name in writer.attributes if name.startswith("scan_")}
    captured = [value for value in reads(writer)[len(writer.inputs) :] if value in same]
    if captured or ordered or len(read) != 1 or min(*read, written) < states:
        return writer, "an iteration may read what an earlier one has written"
    return _obstacle(body, _ancestors(body), body.inputs[read[0]], body.outputs[written])

"""Shapes inside of branches and loops, and of what they give.

ONNX's own inference knows nothing of the state of a ``Loop``, whose sizes may change from step to
step. Here it keeps its rank, which the running function checks; so there is a rank for what is
computed of it.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.shapes import Dim
from ortrain.ops.base import attributes_of

Dims = tuple[Dim, ...] | None


def learn_shapes(graph: ir.Graph) -> int:
    """Fills in shapes that are missing, in sub-graphs too; returns how many values have one now."""
    learned = 0
    for node in graph:
        found = _FORMS.get(node.op_type) if not node.domain else None
        if found is not None:
            inner, known = found(node)
            learned += inner + _fill(zip(node.outputs, known, strict=True))
        elif any(value.shape is None for value in node.outputs):
            learned += _infer(node)
    return learned


def _infer(node: ir.Node) -> int:
    """By the rules of :mod:`ortrain.graph.shapes`, which must not touch what is known."""
    before = [(value, value.type, value.shape) for value in node.outputs]
    shapes.infer(node)
    learned = 0
    for value, kind, shape in before:
        learned += shape is None and value.shape is not None
        value.type, value.shape = kind or value.type, shape or value.shape
    return learned


def _fill(pairs: Iterable[tuple[ir.Value, Dims]]) -> int:
    learned = 0
    for value, known in pairs:
        if value.shape is None and known is not None:
            value.shape = ir.Shape(known)
            learned += 1
    return learned


def _if(node: ir.Node) -> tuple[int, list[Dims]]:
    branches = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
    learned = sum(map(learn_shapes, branches))
    pairs = zip(*(branch.outputs for branch in branches), strict=True)
    return learned, [_common(*map(shapes.dims, pair)) for pair in pairs]


def _loop(node: ir.Node) -> tuple[int, list[Dims]]:
    body, states = node.attributes["body"].as_graph(), node.inputs[2:]
    starts = [_of_rank(shapes.dims(state)) for state in states]
    learned = _fill(zip(body.inputs, [(), (), *starts], strict=True)) + learn_shapes(body)
    rows = [shapes.dims(value) for value in body.outputs[1 + len(states) :]]
    return learned, [*starts, *(None if row is None else (None, *row) for row in rows)]


def _scan(node: ir.Node) -> tuple[int, list[Dims]]:
    given = attributes_of(node)
    body, count = given["body"], len(node.inputs) - given["num_scan_inputs"]
    states = [shapes.dims(value) for value in node.inputs[:count]]
    axes = given.get("scan_input_axes") or [0] * given["num_scan_inputs"]
    slices = [
        None if known is None else tuple(d for i, d in enumerate(known) if i != axis % len(known))
        for known, axis in zip(map(shapes.dims, node.inputs[count:]), axes, strict=True)
    ]
    learned = _fill(zip(body.inputs, [*states, *slices], strict=True)) + learn_shapes(body)
    rows = [shapes.dims(value) for value in body.outputs[count:]]
    places = given.get("scan_output_axes") or [0] * len(rows)
    return learned, [*states, *map(_inserted, rows, places)]


_FORMS = {"If": _if, "Loop": _loop, "Scan": _scan}


def _of_rank(known: Dims) -> Dims:
    return None if known is None else (None,) * len(known)


def _inserted(known: Dims, axis: int) -> Dims:
    """With an axis of unknown size."""
    if known is None:
        return None
    axis %= len(known) + 1
    return (*known[:axis], None, *known[axis:])


def _common(a: Dims, b: Dims) -> Dims:
    """What two shapes share."""
    if a is None or b is None or len(a) != len(b):
        return None
    return tuple(x if shapes.same(x, y) else None for x, y in zip(a, b, strict=True))

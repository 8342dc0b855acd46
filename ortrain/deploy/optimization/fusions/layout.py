"""Transposes and reshapes that undo each other go.

::

    before                                      after
    b = Transpose<[0,2,1,3]>(a)                 (gone)
    c = Transpose<[0,2,1,3]>(b)                 (gone, readers take a)
    e = Reshape(d, [0, 0, 12, 64])              (gone)
    f = Reshape(e, [0, 0, 768])                 (gone, readers take d: [b, s, 768])

A fused operator reads and writes ``[batch, length, heads * size]``; it is put between a transpose
and a reshape on each side, and what of them is double falls away here.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from ortrain.deploy.optimization.fusions.fusion import Place
from ortrain.deploy.optimization.fusions.matching import integer, integers, made_by
from ortrain.graph import shapes


def simplify(place: Place, node: ir.Node) -> bool:
    """Makes one transpose or reshape, with that before it, into none or one."""
    rule = _transposed if node.op_type == "Transpose" else _reshaped
    return rule(place, node)


def order(node: ir.Node) -> list[int] | None:
    """A transpose's permutation."""
    perm = node.attributes.get("perm")
    if perm is not None:
        return [int(axis) for axis in perm.as_ints()]
    rank = shapes.rank(node.inputs[0]) if node.inputs[0] is not None else None
    return None if rank is None else list(range(rank - 1, -1, -1))


def _transposed(place: Place, node: ir.Node) -> bool:
    source, outer = node.inputs[0], order(node)
    before = made_by(source, "Transpose")
    if source is None or outer is None:
        return False
    if outer == sorted(outer):
        return _pass_on(node, source)
    inner = None if before is None else order(before)
    if before is None or inner is None or before.inputs[0] is None:
        return False
    both = [inner[axis] for axis in outer]
    if both == sorted(both):
        return _pass_on(node, before.inputs[0])
    place.replace(node.outputs[0], place.builder(node).Transpose(before.inputs[0], perm=both))
    return True


def _reshaped(place: Place, node: ir.Node) -> bool:
    source, result = node.inputs[0], node.outputs[0]
    if source is None:
        return False
    if _same_size_by_size(source, result):
        return _pass_on(node, source)
    before = made_by(source, "Reshape")
    first = None if before is None else before.inputs[0]
    if before is None or first is None or node.inputs[1] is None:
        return False
    if _same_size_by_size(first, result):
        return _pass_on(node, first)
    as_it_is = integer(node, "allowzero", 0)
    # Where a zero is a zero, a target is the same for whatever is reshaped.
    target = [1] if as_it_is else integers(node.inputs[1])
    if target is None:
        return False
    mine, middle = shapes.dims(first), shapes.dims(source)
    for axis, size in enumerate(target):
        # A zero is the size of what is reshaped, which is another value from now on.
        if size == 0 and (
            mine is None
            or middle is None
            or axis >= min(len(mine), len(middle))
            or not shapes.same(mine[axis], middle[axis])
        ):
            return False
    attributes: dict[str, Any] = {"allowzero": 1} if as_it_is else {}
    op = place.builder(node)
    place.replace(result, op.node("Reshape", [first, node.inputs[1]], **attributes))
    return True


def _same_size_by_size(a: ir.Value, b: ir.Value) -> bool:
    """Whether a reshape of one to the other does nothing: all sizes but one are known to agree."""
    mine, others = shapes.dims(a), shapes.dims(b)
    if mine is None or others is None or len(mine) != len(others):
        return False
    unknown = [(x, y) for x, y in zip(mine, others, strict=True) if not shapes.same(x, y)]
    if not unknown:
        return True
    if len(unknown) > 1 or any(size == 0 for size in mine):
        return False
    return not all(isinstance(size, int) for size in unknown[0])


def _pass_on(node: ir.Node, source: ir.Value) -> bool:
    """Readers take what a node only hands on; an output of the graph keeps its node."""
    result = node.outputs[0]
    if result.is_graph_output() or not result.uses():
        return False
    ir.convenience.replace_all_uses_with(result, source)
    return True

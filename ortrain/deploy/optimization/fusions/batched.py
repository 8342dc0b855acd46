"""Heads that are part of the batch, and apart elsewhere in one attention, are apart in all of it.

::

    before: q, k, v [b, h, n, d]                    after
    s = MatMul(Reshape(q, [b*h, n, d]), k')         s = MatMul(q, Transpose<[0,1,3,2]>(k))
    t = s * scale + alibi   (alibi: [b*h, 1, n])    t = s * scale + Reshape(alibi, [b, h, 1, n])
    u = Reshape(t, [b, h, n, n]) + mask             u = t + mask
    w = Reshape(Softmax(u), [b*h, n, n])            w = Softmax(u)
    y = MatMul(w, Reshape(v, [b*h, n, d]))          y = MatMul(w, v)

Every operator here computes each matrix of the batch by itself, in whatever axes it is counted, so
that each number is the one that it was. What follows, :mod:`.attention`, then finds one pattern.
Made only where the sizes are known to be the same name by name.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ortrain.deploy.optimization.fusions.fusion import Fusion, Place, Refused
from ortrain.deploy.optimization.fusions.layout import order
from ortrain.deploy.optimization.fusions.masks import size_of
from ortrain.deploy.optimization.fusions.matching import (
    integer,
    is_last_axis,
    made_by,
    only_reader,
    scalar,
)
from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.graph.shapes import Dim

_ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Where")
# Nodes between two of an attention's reshapes; the longest known has six.
_FAR = 24


def _apply(place: Place, node: ir.Node) -> bool:
    left, right = node.inputs
    values = None if right is None else _folded(right)
    if left is None or right is None or values is None or shapes.rank(left) != 3:
        return False
    split = shapes.dims(values)
    if split is None or not isinstance(split[1], int) or not _of_softmax(left):
        return False
    lift = _Lift(place, values, (split[0], split[1]), _sizes(right)[0])
    # Of an attention that is in the batch throughout, a kernel takes each head as a row.
    if not lift.mixed(left):
        return False
    if only_reader(left) is not node:
        raise Refused("its weights are read elsewhere")
    op = place.builder(node)
    weights = lift.value(op, left)
    product = op.MatMul(weights, values)
    rows, length, width = _sizes(node.outputs[0])
    if not isinstance(width, int):
        return False
    product.shape = ir.Shape([*split[:2], length, width])
    flat = op.Mul(size_of(place, op, values, 0), op.constant([split[1]], np.dtype(np.int64)))
    target = op.Concat(flat, size_of(place, op, weights, 2), [width], axis=0)
    result = op.Reshape(product, target)
    result.shape = ir.Shape([rows, length, width])
    place.replace(node.outputs[0], result, "heads apart")
    return True


def _sizes(value: ir.Value) -> tuple[Dim, Dim, Dim]:
    known = shapes.dims(value)
    assert known is not None
    return known[0], known[1], known[2]


def _folded(value: ir.Value) -> ir.Value | None:
    """``x``, [b, h, n, d], of a reshape of it to [b * h, n, d]."""
    node = made_by(value, "Reshape")
    source = None if node is None else node.inputs[0]
    mine, others = shapes.dims(source), shapes.dims(value)
    if source is None or mine is None or others is None or (len(mine), len(others)) != (4, 3):
        return None
    same = shapes.same(mine[2], others[1]) and shapes.same(mine[3], others[2])
    return source if same else None


def _of_softmax(value: ir.Value) -> bool:
    """Whether a value is a softmax over its last axis, through reshapes that keep that axis."""
    for _ in range(_FAR):
        node = made_by(value, "Reshape", "Softmax", "Where")
        if node is None:
            return False
        if node.op_type == "Softmax":
            return is_last_axis(integer(node, "axis", -1), value)
        inner = node.inputs[2 if node.op_type == "Where" else 0]
        if inner is None:
            return False
        value = inner
    return False


class _Lift:
    """Values [b * h, …] of an attention as [b, h, …].

    Args:
        place: of the graph.
        values: [b, h, n, d], for its sizes.
        split: batch and heads.
        rows: their product.
    """

    def __init__(self, place: Place, values: ir.Value, split: tuple[Dim, Dim], rows: Dim) -> None:
        self.place, self.values, self.split, self.rows = place, values, split, rows
        self._made: dict[ir.Value, ir.Value] = {}

    def mixed(self, value: ir.Value) -> bool:
        """Whether heads are apart somewhere between the last product and the first."""
        for _ in range(_FAR):
            node = made_by(value, "Reshape", "Softmax", *_ELEMENTWISE)
            if node is None:
                return False
            if node.op_type == "Reshape":
                return self._split(value) or _folded(value) is not None
            wide = [v for v in node.inputs if v is not None and shapes.rank(v) in (3, 4)]
            inner = [v for v in wide if shapes.dims(v) == shapes.dims(value)]
            if not inner:
                return False
            value = next((v for v in inner if v.producer() is not None), inner[0])
        return False

    def value(self, op: Builder, value: ir.Value) -> ir.Value:
        """[b, h, …] of [b * h, …].

        Raises:
            Refused: it is not known to have as many rows.
        """
        if value not in self._made:
            known = shapes.dims(value)
            if known is None or not shapes.same(known[0], self.rows):
                raise Refused("heads are part of the batch in one of its parts, and another is not")
            made = self._lifted(op, value)
            made.shape = made.shape or ir.Shape([*self.split, *known[1:]])
            self._made[value] = made
        return self._made[value]

    def _lifted(self, op: Builder, value: ir.Value) -> ir.Value:
        source, node = _folded(value), value.producer()
        if source is not None and self._of_split(source):
            return self._apart(op, source)
        if node is not None and not node.domain and node.graph is self.place.graph:
            perm = order(node) if node.op_type == "Transpose" else None
            first = node.inputs[0]
            if perm == [0, 2, 1] and first is not None and self._is_whole(first):
                made: ir.Value = op.Transpose(self.value(op, first), perm=[0, 1, 3, 2])
                return made
            if node.op_type == "Softmax" and is_last_axis(integer(node, "axis", -1), value):
                return self._again(op, node, {"axis": -1})
            if node.op_type in ("MatMul", *_ELEMENTWISE):
                return self._again(op, node, {})

        def make() -> ir.Value:
            rows = [size_of(self.place, op, self.values, axis) for axis in (0, 1)]
            lengths = [size_of(self.place, op, value, axis) for axis in (1, 2)]
            split: ir.Value = op.Reshape(value, op.Concat(*rows, *lengths, axis=0))
            split.shape = None
            return split

        # Positions are the same for all layers.
        parted: ir.Value = self.place.once(("apart", value, *self.split), make)
        return parted

    def _again(self, op: Builder, node: ir.Node, attributes: dict[str, Any]) -> ir.Value:
        """The operator of a node on what its operands are with heads apart."""
        operands = []
        for each in node.inputs:
            wide = each is not None and shapes.rank(each) == 3 and scalar(each) is None
            if each is not None and wide:
                first = shapes.dims(each) or (None,)
                each = op.Unsqueeze(each, [0]) if first[0] == 1 else self.value(op, each)
            operands.append(each)
        made: ir.Value = op.node(node.op_type, operands, **attributes)
        made.shape = None
        return made

    def _apart(self, op: Builder, value: ir.Value) -> ir.Value:
        """A value with heads apart, between which and the first product no reshape is left."""
        node = value.producer()
        if node is None or node.domain or node.graph is not self.place.graph:
            return value
        if node.op_type == "Reshape" and self._split(value):
            assert node.inputs[0] is not None
            return self.value(op, node.inputs[0])
        if node.op_type not in ("Softmax", *_ELEMENTWISE) or not self._reshaped_below(value):
            return value
        operands = [
            self._apart(op, each) if each is not None and self._of_split(each) else each
            for each in node.inputs
        ]
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        made: ir.Value = op.node(node.op_type, operands, **attributes)
        made.shape = value.shape
        return made

    def _reshaped_below(self, value: ir.Value) -> bool:
        """Whether a split of heads comes before, by way of operators that are made again."""
        wanted, seen = [value], 0
        while wanted and seen < _FAR:
            each, seen = wanted.pop(), seen + 1
            node = made_by(each, "Reshape", "Softmax", *_ELEMENTWISE)
            if node is None:
                continue
            if node.op_type == "Reshape":
                if self._split(each):
                    return True
                continue
            wanted += [v for v in node.inputs if v is not None and self._of_split(v)]
        return False

    def _of_split(self, value: ir.Value) -> bool:
        known = shapes.dims(value)
        return (
            known is not None
            and len(known) == 4
            and all(shapes.same(x, y) for x, y in zip(known[:2], self.split, strict=True))
        )

    def _split(self, value: ir.Value) -> bool:
        """Whether a value is a reshape of [b * h, n, m] to [b, h, n, m]."""
        node = made_by(value, "Reshape")
        source = None if node is None else shapes.dims(node.inputs[0])
        known = shapes.dims(value)
        return (
            source is not None
            and known is not None
            and len(source) == 3
            and self._of_split(value)
            and shapes.same(source[1], known[2])
            and shapes.same(source[2], known[3])
        )

    def _is_whole(self, value: ir.Value) -> bool:
        return shapes.rank(value) == 3


FUSION = Fusion(
    "heads apart",
    frozenset({("", "MatMul")}),
    _apply,
    lambda config: not config.disable_attention_fusion,
)

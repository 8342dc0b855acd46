"""Rotary embeddings become one operator.

::

    before: x [b, h, n, d], cos and sin [b, 1, n, d]     after
    r = Concat<-1>(Neg(x[..., d/2:]), x[..., :d/2])      y = RotaryEmbedding(x, positions, c, s)
    y = x * cos + r * sin

The operator takes one half of cos and sin, a row for each position. That the halves are equal has
to follow from the graph: both come from ``Concat(f, f)`` through operators of single numbers, or
are constants of equal halves. The half is then computed from ``f``, once for all layers, and every
token is told the number of its row, so that positions may be any.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ortrain.deploy.optimization.fusions.fusion import DTYPES, Fusion, Place, Refused
from ortrain.deploy.optimization.fusions.heads import apart, merged, splits_heads, whole
from ortrain.deploy.optimization.fusions.masks import size_of
from ortrain.deploy.optimization.fusions.matching import (
    either_way,
    integer,
    integers,
    is_last_axis,
    made_by,
    operand,
    scalar,
    weight,
)
from ortrain.graph import shapes
from ortrain.graph.build import Builder

_UNARY = frozenset({"Cos", "Sin", "Cast", "Neg", "Identity"})
_BINARY = frozenset({"Mul", "Div", "Add", "Sub"})


def _apply(place: Place, node: ir.Node) -> bool:
    if node.op_type == "RotaryEmbedding":
        return _operator(place, node)
    for left, right in either_way(node):
        straight, turned = made_by(left, "Mul"), made_by(right, "Mul")
        for rotated, sine in either_way(turned) if turned is not None else ():
            x = _rotated(rotated)
            for same, cosine in either_way(straight) if straight is not None else ():
                if x is not None and same is x:
                    return _replace(place, node, x, cosine, sine)
    return False


def _replace(place: Place, node: ir.Node, x: ir.Value, cosine: ir.Value, sine: ir.Value) -> bool:
    known, c, s = shapes.dims(x), shapes.dims(cosine), shapes.dims(sine)
    if known is None or len(known) != 4 or c is None or s is None:
        raise Refused("it has other than four axes")
    size = known[3]
    if x.dtype not in DTYPES or cosine.dtype != x.dtype or sine.dtype != x.dtype:
        raise Refused(f"no kernel computes it in {x.dtype}, or of several dtypes")
    if not isinstance(known[1], int) or not isinstance(size, int) or size % 2:
        raise Refused("the number of heads or their size is unknown")
    if len(c) != 4 or c != s or c[1] != 1 or c[3] != size or not shapes.same(c[2], known[2]):
        raise Refused("cos and sin are not [batch or 1, 1, length, size]")
    if c[0] != 1 and not shapes.same(c[0], known[0]):
        raise Refused("cos and sin may have another batch")
    op = place.builder(node)
    cache, other = (_cache(place, op, part, size) for part in (cosine, sine))
    if cache is None or other is None:
        raise Refused("the halves of cos or sin are not known to be equal")
    positions = _positions(place, op, cosine)
    _put(place, op, node, x, [positions, cache, other])
    return True


def _operator(place: Place, node: ir.Node) -> bool:
    """The operator of opset 23 on heads apart, whose kernel takes no angles that rows share."""
    x, cosine, sine = node.inputs[:3]
    known, c, s = shapes.dims(x), shapes.dims(cosine), shapes.dims(sine)
    if x is None or cosine is None or sine is None or known is None or c is None or s is None:
        return False
    if len(known) != 4 or x.dtype not in DTYPES or integer(node, "rotary_embedding_dim", 0):
        return False
    size, given = known[3], operand(node, 3)
    if not isinstance(known[1], int) or not isinstance(size, int) or c != s or c[-1] != size // 2:
        raise Refused("the number of heads or their size is unknown")
    op = place.builder(node)
    if given is not None:
        positions, caches = given, [cosine, sine]
    elif len(c) == 3 and (c[0] == 1 or shapes.same(c[0], known[0])):
        positions = _positions(place, op, cosine)
        caches = [_rows(place, op, part, size // 2) for part in (cosine, sine)]
    else:
        raise Refused("cos and sin may have another batch")
    _put(place, op, node, x, [positions, *caches], interleaved=integer(node, "interleaved", 0))
    return True


def _put(
    place: Place,
    op: Builder,
    node: ir.Node,
    x: ir.Value,
    angles: list[ir.Value],
    interleaved: int = 0,
) -> None:
    """The fused operator, on heads that are merged where that needs no copy."""
    known = shapes.dims(x)
    assert known is not None
    # One head is the same in either form, but of several only the flat one needs no copies.
    flat = splits_heads(x)
    attributes: dict[str, Any] = {"num_heads": whole(known[1])} if flat else {}
    if interleaved:
        attributes["interleaved"] = 1
    result = op.node(
        "RotaryEmbedding",
        [merged(op, x) if flat else x, *angles],
        domain="com.microsoft",
        **attributes,
    )
    if not flat:
        result.shape = x.shape
        place.replace(node.outputs[0], result, "RotaryEmbedding")
        return
    heads = whole(known[1])
    result.shape = ir.Shape([known[0], known[2], heads * whole(known[3])])
    place.replace(node.outputs[0], apart(op, result, heads), "RotaryEmbedding")


def _rotated(value: ir.Value) -> ir.Value | None:
    """``x`` of ``Concat<-1>(-x[..., d/2:], x[..., :d/2])``."""
    concat = made_by(value, "Concat")
    if concat is None or len(concat.inputs) != 2 or not _of_last_axis(concat, value):
        return None
    negated, low = made_by(concat.inputs[0], "Neg"), concat.inputs[1]
    high = None if negated is None else negated.inputs[0]
    below, above = _part(low), _part(high)
    if below is None or above is None or below[0] is not above[0]:
        return None
    known = shapes.dims(below[0])
    if known is None or not isinstance(known[-1], int) or known[-1] % 2:
        return None
    half = known[-1] // 2
    return below[0] if below[1:] == (0, half) and above[1:] == (half, 2 * half) else None


def _of_last_axis(node: ir.Node, value: ir.Value) -> bool:
    return is_last_axis(integer(node, "axis", 0), value)


def _part(value: ir.Value | None) -> tuple[ir.Value, int, int] | None:
    """The value of which another is a part of the last axis, from where and to where."""
    node = made_by(value, "Slice", "Split")
    if node is None or value is None or node.inputs[0] is None:
        return None
    source = node.inputs[0]
    known = shapes.dims(source)
    size = known[-1] if known else None
    if not isinstance(size, int):
        return None
    if node.op_type == "Split":
        widths = [(shapes.dims(v) or (None,))[-1] for v in node.outputs]
        if not _of_last_axis(node, source) or not all(isinstance(w, int) for w in widths):
            return None
        numbers = [w for w in widths if isinstance(w, int)]
        place = node.outputs.index(value)
        return source, sum(numbers[:place]), sum(numbers[: place + 1])
    start, end, axes = (integers(operand(node, i)) for i in (1, 2, 3))
    step = [1] if operand(node, 4) is None else integers(operand(node, 4))
    if start is None or end is None or axes is None or step != [1] or len(axes) != 1:
        return None
    if not is_last_axis(axes[0], source):
        return None
    low, high, _ = slice(start[0], end[0]).indices(size)
    return source, low, high


def _cache(place: Place, op: Builder, value: ir.Value, size: int) -> ir.Value | None:
    """Half of cos or sin, [positions, size / 2]."""

    def make() -> ir.Value | None:
        half = _half(op, value, size)
        return None if half is None else op.Reshape(half, [-1, size // 2])

    made: ir.Value | None = place.once(("half", value), make)
    return made


def _half(op: Builder, value: ir.Value | None, size: int) -> ir.Value | None:
    """The first half of a value's last axis, where the second is equal to it."""
    node = None if value is None else value.producer()
    if value is None:
        return None
    if weight(value) is not None:
        array = shapes.constant(value)
        if array is None or array.shape[-1:] != (size,):
            return None
        low, high = array[..., : size // 2], array[..., size // 2 :]
        return op.constant(low) if np.array_equal(low, high) else None
    if node is None or node.domain:
        return None
    if node.op_type == "Concat":
        same = len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
        return node.inputs[0] if same and _of_last_axis(node, value) else None
    rank = shapes.rank(value)
    if node.op_type in _UNARY:
        inner = _half(op, node.inputs[0], size)
        return None if inner is None else _again(op, node, [inner])
    if node.op_type in _BINARY:
        for place in (0, 1):
            if scalar(node.inputs[1 - place]) is None:
                continue
            inner = _half(op, node.inputs[place], size)
            operands = [inner, node.inputs[1]] if place == 0 else [node.inputs[0], inner]
            return None if inner is None else _again(op, node, operands)
        return None
    if node.op_type == "Unsqueeze" and rank is not None:
        axes = integers(operand(node, 1))
        if axes is None or any(axis in (-1, rank - 1) for axis in axes):
            return None
        inner = _half(op, node.inputs[0], size)
        return None if inner is None else _again(op, node, [inner, node.inputs[1]])
    if node.op_type == "Gather" and integer(node, "axis", 0) == 0:
        # Rows of a table.
        table = node.inputs[0]
        if weight(table) is None or shapes.rank(table or value) != 2:
            return None
        inner = _half(op, table, size)
        return None if inner is None else _again(op, node, [inner, node.inputs[1]])
    if node.op_type == "Slice":
        axes = integers(operand(node, 3))
        if rank is None or axes is None or any(a in (-1, rank - 1) for a in axes):
            return None
        inner = _half(op, node.inputs[0], size)
        return None if inner is None else _again(op, node, [inner, *node.inputs[1:]])
    return None


def _again(op: Builder, node: ir.Node, operands: list[ir.Value | None]) -> ir.Value:
    """The operator of a node with other operands."""
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    result: ir.Value = op.node(node.op_type, operands, **attributes)
    return result


def _rows(place: Place, op: Builder, value: ir.Value, size: int) -> ir.Value:
    """The angles of all rows below each other, [positions, size]."""
    made: ir.Value = place.once(("rows", value), lambda: op.Reshape(value, [-1, size]))
    return made


def _positions(place: Place, op: Builder, cosine: ir.Value) -> ir.Value:
    """The row of cos and sin for each token: [batch, length], or the first of them, [1].

    Args:
        place: of the graph.
        op: where it is made.
        cosine: [batch or 1, …, length, size].
    """
    known = shapes.dims(cosine)
    assert known is not None
    if known[0] == 1:
        return op.constant([0], np.dtype(np.int64))

    def make() -> ir.Value:
        batch, length = (size_of(place, op, cosine, axis) for axis in (0, -2))
        sizes = op.Concat(batch, length, axis=0)
        rows = op.Squeeze(op.Mul(batch, length), [0])
        numbers = op.Range(np.int64(0), rows, np.int64(1))
        result: ir.Value = op.Reshape(numbers, sizes)
        return result

    token = (known[0], known[-2]) if None not in (known[0], known[-2]) else (cosine,)
    made: ir.Value = place.once(("positions", *token), make)
    return made


FUSION = Fusion(
    "rotary embedding",
    frozenset({("", "Add"), ("", "RotaryEmbedding")}),
    _apply,
    lambda config: not config.disable_rotary_embeddings,
)

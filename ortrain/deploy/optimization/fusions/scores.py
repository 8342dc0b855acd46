"""The scores of an attention in a graph: a product of queries and keys, scaled, with masks.

::

    softmax(scale * query keyᵀ + mask₁ + mask₂ …)

in every order in which exporters write it: factors on the query, on the key, on both, on their
product or on the product and the masks together, as a multiplication or a division; keys that are
transposed in one step, in one with the split into heads, or by way of three axes; masks that are
added, or that choose between the scores and a number.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ortrain.deploy.optimization.fusions.fusion import Refused
from ortrain.deploy.optimization.fusions.layout import order
from ortrain.deploy.optimization.fusions.matching import (
    either_way,
    is_last_axis,
    made_by,
    operand,
    scalar,
    times_scalar,
    weight,
)
from ortrain.graph import shapes

# A number beside which no score counts: half a unit in the last place of 1e30 is 4e22 in float32.
# What is masked with -1e4 still competes where a whole row is masked, and the scores decide.
ABSORBING = -1e30
# Nodes before a softmax that are looked through for the reason why it is none of an attention.
_FAR = 16


@dataclass(frozen=True)
class Chosen:
    """A mask that chooses: scores where ``condition`` is ``keeps``, ``fill`` elsewhere."""

    condition: ir.Value
    keeps: bool
    fill: float


@dataclass(frozen=True)
class Scores:
    """What goes into the softmax of an attention.

    Attributes:
        query: [batch, heads, length, size], or [batch, length, size].
        key: likewise with its own length; where ``key_order`` is given, what that permutes to it.
        key_order: of the axes, None where ``key`` is the key itself.
        scale: of their product.
        masks: what is added, and its factor.
        chosen: masks that choose.
        result: the scores themselves.
    """

    query: ir.Value
    key: ir.Value
    key_order: tuple[int, ...] | None
    scale: float
    masks: tuple[tuple[ir.Value, float], ...]
    chosen: tuple[Chosen, ...]
    result: ir.Value


@dataclass
class _Found:
    factor: float = 1.0
    masks: list[tuple[ir.Value, float]] = field(default_factory=list)
    chosen: list[Chosen] = field(default_factory=list)


def scores_of(value: ir.Value | None) -> Scores | None:
    """The scores that a value is; None where it comes of no product."""
    found = _Found()
    product = _descend(value, found)
    if product is None or value is None:
        return None
    query, left = _unscaled(product.inputs[0])
    if product.inputs[1] is None or query is None:
        return None
    straight = _straight(product.inputs[1])
    if straight is None:
        return None
    key, key_order, right = straight
    scale = found.factor * left * right
    return Scores(query, key, key_order, scale, tuple(found.masks), tuple(found.chosen), value)


def _descend(value: ir.Value | None, found: _Found) -> ir.Node | None:
    """The product below a value; what is met on the way goes into ``found``."""
    node = made_by(value, "MatMul", "Add", "Mul", "Div", "Where")
    if node is None or value is None:
        return None
    if node.op_type == "MatMul":
        return node
    if node.op_type in ("Mul", "Div"):
        scaled = times_scalar(value)
        if scaled is None:
            return None
        found.factor *= scaled[1]
        return _descend(scaled[0], found)
    before = (found.factor, len(found.masks), len(found.chosen))
    if node.op_type == "Add":
        for inner, mask in either_way(node):
            # A mask of more axes than the scores would widen them.
            if shapes.rank(inner) == shapes.rank(value):
                found.masks.append((mask, found.factor))
                if (product := _descend(inner, found)) is not None:
                    return product
                found.factor = before[0]
                del found.masks[before[1] :], found.chosen[before[2] :]
        return None
    return _chosen(node, found)


def _chosen(node: ir.Node, found: _Found) -> ir.Node | None:
    condition = node.inputs[0]
    if condition is None or found.factor != 1.0:
        return None
    for place, other in ((1, 2), (2, 1)):
        fill = scalar(node.inputs[other])
        if fill is None:
            continue
        found.chosen.append(Chosen(condition, place == 1, fill))
        if (product := _descend(node.inputs[place], found)) is not None:
            return product
        found.chosen.pop()
    return None


def stands_between(value: ir.Value | None) -> str | None:
    """The operator for which a value is no scores, although a product of two values is below it."""
    wanted = [(value, "")]
    for _ in range(_FAR):
        if not wanted:
            return None
        each, strange = wanted.pop(0)
        node = None if each is None else each.producer()
        if node is None:
            continue
        if node.op_type == "MatMul" and all(v is None or weight(v) is None for v in node.inputs):
            return strange or "a key that is not transposed"
        if not strange and not _is_passed(node):
            strange = node.op_type
        wanted += [(each, strange) for each in node.inputs]
    return None


def _is_passed(node: ir.Node) -> bool:
    """Whether scores are looked for behind a node."""
    if node.domain:
        return False
    if node.op_type in ("Mul", "Div"):
        return times_scalar(node.outputs[0]) is not None
    if node.op_type == "Where":
        return any(scalar(v) is not None for v in node.inputs[1:])
    return node.op_type == "Add"


def check_fills(scores: Scores) -> None:
    """Refuses masks whose number is not beyond every score.

    Raises:
        Refused: a fully masked row would be another than before.
    """
    for mask in scores.chosen:
        half = scores.result.dtype == ir.DataType.FLOAT16 and mask.fill != -np.inf
        if not mask.fill <= ABSORBING or half:
            raise Refused(
                f"masked scores are replaced by {mask.fill:g}, to which a score that is added "
                "would still count where a whole row is masked"
            )


def _unscaled(value: ir.Value | None) -> tuple[ir.Value | None, float]:
    """A value without its constant factors, and these."""
    factor = 1.0
    while (scaled := times_scalar(value)) is not None:
        value, factor = scaled[0], factor * scaled[1]
    return value, factor


def _straight(value: ir.Value) -> tuple[ir.Value, tuple[int, ...] | None, float] | None:
    """The key whose transpose a value is, a permutation that makes it, and its factors."""
    inner, factor = _unscaled(value)
    node = made_by(inner, "Transpose", "Reshape")
    if node is None or node.inputs[0] is None or inner is None:
        return None
    if node.op_type == "Reshape":
        key = _by_three_axes(node, inner)
        if key is None:
            return None
        key, more = _unscaled(key)
        return None if key is None else (key, None, factor * more)
    perm = order(node)
    if perm is None or len(perm) not in (3, 4):
        return None
    last_two = [*perm[:-2], perm[-1], perm[-2]]
    key, more = _unscaled(node.inputs[0])
    if key is None:
        return None
    return key, None if last_two == sorted(last_two) else tuple(last_two), factor * more


def _by_three_axes(node: ir.Node, result: ir.Value) -> ir.Value | None:
    """The key of ``Reshape(Transpose<[0,2,1]>(Reshape(key, [-1, T, D])), [B, N, D, T])``."""
    middle = made_by(node.inputs[0], "Transpose")
    first = None if middle is None else made_by(middle.inputs[0], "Reshape")
    if middle is None or first is None or order(middle) != [0, 2, 1]:
        return None
    key, flat = first.inputs[0], shapes.dims(middle.inputs[0])
    mine, others = shapes.dims(key), shapes.dims(result)
    if mine is None or others is None or flat is None or len(mine) != len(others) != 4:
        return None
    swapped = (*mine[:2], mine[3], mine[2])
    rows_stay = shapes.same(flat[1], mine[2]) or _takes(first, 1, key, 2)
    if not rows_stay or flat[2] != mine[3]:
        return None
    unproven = [i for i, (a, b) in enumerate(zip(swapped, others, strict=True)) if a != b]
    return key if not unproven else None


def _takes(reshape: ir.Node, axis: int, value: ir.Value | None, of: int) -> bool:
    """Whether a reshape's target has the size of a value's axis at a place."""
    concat = made_by(reshape.inputs[1], "Concat")
    part = None if concat is None else operand(concat, axis)
    shape = made_by(part, "Shape")
    if shape is None or shape.inputs[0] is not value or value is None:
        return False
    rank = shapes.rank(value) or 0
    start = shape.attributes.get("start")
    return start is not None and rank > 0 and start.as_int() % rank == of


def softmax_of(value: ir.Value | None) -> tuple[ir.Node, bool] | None:
    """The softmax over the last axis that a value is, and whether its NaN are made zeros.

    A row of nothing but minus infinity gives NaN. Some exporters put
    ``Where(IsNaN(w), 0, w)`` behind, as PyTorch gives zeros for such a row.
    """
    guarded = False
    if (where := made_by(value, "Where")) is not None:
        check = made_by(where.inputs[0], "IsNaN")
        if check is None or check.inputs[0] is not where.inputs[2] or scalar(where.inputs[1]) != 0:
            return None
        value, guarded = where.inputs[2], True
    node = made_by(value, "Softmax")
    if node is None or value is None or node.inputs[0] is None:
        return None
    default = node.attributes.get("axis")
    axis = default.as_int() if default is not None else -1
    return (node, guarded) if is_last_axis(axis, value) else None

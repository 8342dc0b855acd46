"""What masks add to the scores, in the one form that every kernel of attention takes.

::

    [batch or 1, heads or 1, length, keys]   added to the scores, in their dtype

Made once for all layers that share a mask, it costs a copy of the mask; nothing is told from the
values that a mask may have, so that any mask gives what it gave before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ortrain.deploy.optimization.fusions.fusion import Place, Refused
from ortrain.deploy.optimization.fusions.scores import Chosen
from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.graph.shapes import Dim


def bias_of(
    place: Place,
    op: Builder,
    masks: Sequence[tuple[ir.Value, float]],
    chosen: Sequence[Chosen],
    dtype: ir.DataType,
) -> ir.Value | None:
    """The sum of all masks in the scores' dtype, in whatever shape they have; None without one."""
    if not masks and not chosen:
        return None
    key = ("bias", *masks, *chosen)

    def make() -> ir.Value:
        total: ir.Value | None = None
        for mask, factor in masks:
            if mask.dtype != dtype:
                raise Refused(f"the mask is {mask.dtype}, the scores are {dtype}")
            part = mask if factor == 1.0 else op.Mul(mask, factor)
            total = part if total is None else op.Add(total, part)
        for choice in chosen:
            zero, fill = op.constant(0.0, dtype), op.constant(choice.fill, dtype)
            sides = (zero, fill) if choice.keeps else (fill, zero)
            part = op.Where(choice.condition, *sides)
            total = part if total is None else op.Add(total, part)
        assert total is not None
        return total

    made: ir.Value = place.once(key, make)
    return made


def seen_by(place: Place, op: Builder, bias: ir.Value) -> tuple[ir.Value, ir.Value]:
    """A bias in which rows of nothing but minus infinity are zeros, and 0 for these rows, else 1.

    Args:
        place: of the graph.
        op: where they are made.
        bias: added to scores.

    Returns:
        The bias, and the factor of what comes of each row, [..., length, 1].
    """

    def make() -> tuple[ir.Value, ir.Value]:
        assert bias.dtype is not None
        lowest = op.constant(-np.inf, bias.dtype)
        # In numbers: onnxruntime's ReduceMax of booleans is a loop.
        if op.opset >= 18:
            largest = op.ReduceMax(bias, [-1], keepdims=1)
        else:
            largest = op.ReduceMax(bias, axes=[-1], keepdims=1)
            known = shapes.dims(bias)
            largest.shape = None if known is None else ir.Shape([*known[:-1], 1])
        seen = op.Greater(largest, lowest)
        return op.Where(seen, bias, op.constant(0.0, bias.dtype)), op.cast(seen, bias.dtype)

    made: tuple[ir.Value, ir.Value] = place.once(("seen", bias), make)
    return made


def spread(
    place: Place, op: Builder, bias: ir.Value, sizes: Sequence[Dim], query: ir.Value, key: ir.Value
) -> ir.Value:
    """A bias of four axes, the last two of which are as long as the scores'.

    Args:
        place: of the graph.
        op: where it is made.
        bias: which broadcasts to the scores.
        sizes: of the scores: batch, heads, queries and keys.
        query: [..., queries, size].
        key: [..., keys, size].

    Raises:
        Refused: it is not known to broadcast over batch and heads as a kernel takes it.
    """
    mine = shapes.dims(bias)
    if mine is None or len(mine) > 4:
        raise Refused("the rank of the mask is unknown, or above 4")
    full: tuple[Dim, ...] = (*(1,) * (4 - len(mine)), *mine)
    for axis, what in ((0, "batch"), (1, "heads")):
        if full[axis] != 1 and not shapes.same(full[axis], sizes[axis]):
            raise Refused(f"the mask may have another {what} than the query")
    for axis, what in ((2, "queries"), (3, "keys")):
        ours, size = full[axis], sizes[axis]
        if isinstance(ours, int) and ours != 1 and isinstance(size, int) and ours != size:
            raise Refused(f"the mask is for {ours} {what}, of which there are {size}")
    lengths = (sizes[2], sizes[3])
    token = lengths if None not in lengths else (query, key)

    def make() -> ir.Value:
        result = bias
        if len(mine) < 4:
            result = op.Unsqueeze(result, [*range(4 - len(mine))])
        if not (shapes.same(full[2], sizes[2]) and shapes.same(full[3], sizes[3])):
            ones = op.constant([1, 1], np.dtype(np.int64))
            target = op.Concat(
                ones, size_of(place, op, query, -2), size_of(place, op, key, -2), axis=0
            )
            result = op.Expand(result, target)
        result.shape = ir.Shape([full[0], full[1], *lengths])
        return result

    made: ir.Value = place.once(("spread", bias, *token), make)
    return made


def _first(place: Place) -> dict[Dim, tuple[ir.Value, int]]:
    """Each name of a size, and the first axis in the graph that has it."""
    found: dict[Dim, tuple[ir.Value, int]] = {}
    values = [*place.graph.inputs, *(value for node in place.graph for value in node.outputs)]
    for value in values:
        for axis, dim in enumerate(shapes.dims(value) or ()):
            if isinstance(dim, str):
                found.setdefault(dim, (value, axis))
    return found


def size_of(place: Place, op: Builder, value: ir.Value, axis: int) -> ir.Value:
    """The size of an axis, int64 [1]: of the first value of the graph that has it too.

    A value in the middle, a key that is part of a fused operator, would have to be computed for its
    size alone: of MiniLM in older files, 12 of 30 products.
    """
    known = shapes.dims(value)
    assert known is not None
    size = known[axis]
    if isinstance(size, int):
        return op.constant([size], np.dtype(np.int64))
    first = None if size is None else place.once(("sizes",), lambda: _first(place)).get(size)
    source, axis = first or (value, axis % len(known))

    def make() -> ir.Value:
        if op.opset >= 15:
            return op.Shape(source, start=axis, end=axis + 1)
        return op.Gather(op.Shape(source), [axis])  # a Shape had no range

    made: ir.Value = place.once(("size", source, axis), make)
    return made

"""Adding at places that repeat, spelled so that every runtime adds all of them.

onnxruntime's ``ScatterND`` adds with several threads and without a lock: where an index repeats,
additions are lost (seen with 1.31: a table of 30,522 rows, 1,024 updates, 2 threads; off by whole
updates). ``ScatterElements`` adds one after the other: 3 ms more for 1,024 updates of 768.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from ortrain.errors import GraphError
from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.graph.indices import is_never_negative

# From so many rows on, repeated indices are summed in a small table first, from which the large one
# is gathered: ``ScatterElements`` would fill one large table with zeros and copy it into another.
LARGE = 4096


def add_rows(op: Builder, data: ir.Value, indices: ir.Value, updates: ir.Value) -> ir.Value:
    """``data`` [V, *rest] with ``updates`` [..., *rest] added at the rows ``indices`` [...]."""
    return _reduce_rows(op, data, indices, updates, "add")


def rows_of_zeros(op: Builder, like: ir.Value, indices: ir.Value, updates: ir.Value) -> ir.Value:
    """Zeros like a table [V, *rest] with ``updates`` [..., *rest] added at ``indices`` [...]."""
    assert like.dtype is not None
    zero = op.constant(0, like.dtype)
    known = shapes.dims(like)
    if known is None or not isinstance(known[0], int) or known[0] < LARGE:
        return add_rows(op, op.zeros_like(like), indices, updates)
    flat = op.Reshape(op.cast(indices, ir.DataType.INT64), [-1])
    updates = op.Reshape(updates, _rows_of(op, op.constant([-1]), like))
    count = op.Squeeze(op.dim(flat, 0), [0])
    # Update i has place i + 1 in the small table, or that of another update of the same row. Place
    # 0 stays zero, for the rows without an update.
    nowhere = op.Expand(np.int64(0), op.dim(like, 0))
    place_of = op.ScatterElements(nowhere, flat, op.Range(np.int64(1), count + 1, np.int64(1)))
    rows = op.Unsqueeze(count + 1, [0])
    small = op.Expand(zero, _rows_of(op, rows, like))
    small.shape = ir.Shape([None, *known[1:]])
    sums = _scatter(op, small, op.Gather(place_of, flat), updates, "add")
    result: ir.Value = op.Gather(sums, place_of)
    result.shape = like.shape
    return result


def _reduce_rows(
    op: Builder, data: ir.Value, indices: ir.Value, updates: ir.Value, reduction: str
) -> ir.Value:
    """``data`` [V, *rest] reduced with ``updates`` [..., *rest] at the rows ``indices`` [...]."""
    assert shapes.rank(data) is not None, "capture gives every value a rank"
    if shapes.rank(indices) != 1:
        updates = op.Reshape(updates, _rows_of(op, op.constant([-1]), data))
    return _scatter(op, data, op.cast(indices, ir.DataType.INT64), updates, reduction)


def _scatter(
    op: Builder, data: ir.Value, indices: ir.Value, updates: ir.Value, reduction: str
) -> ir.Value:
    """The same for one index a row of the updates: ``indices`` has N elements in all."""
    rest = (shapes.dims(data) or ())[1:]
    if not rest:
        return _scatter_elements(op, data, op.Reshape(indices, [-1]), updates, reduction)
    if any(not isinstance(size, int) for size in rest):
        places = op.Reshape(indices, np.array([-1] + [1] * len(rest), np.int64))
        places = op.Expand(places, op.Shape(updates))
        return _scatter_elements(op, data, places, updates, reduction)
    # Over flat tensors it takes two thirds of the time: 1.4 against 2.1 ms for 1,024 rows of 768.
    width = math.prod(size for size in rest if isinstance(size, int))
    places = op.Reshape(indices, [-1, 1]) * width + op.constant(np.arange(width, dtype=np.int64))
    table, places, updates = (op.Reshape(value, [-1]) for value in (data, places, updates))
    flat = _scatter_elements(op, table, places, updates, reduction)
    result: ir.Value = op.Reshape(flat, [-1, *rest])
    result.shape = data.shape
    return result


def _scatter_elements(
    op: Builder, data: ir.Value, places: ir.Value, updates: ir.Value, reduction: str
) -> ir.Value:
    result: ir.Value = op.ScatterElements(data, places, updates, axis=0, reduction=reduction)
    return result


def _rows_of(op: Builder, rows: ir.Value, like: ir.Value) -> ir.Value:
    """The shape of a table with other rows: ``[rows, *rest]``."""
    length = shapes.rank(like)
    assert length is not None
    if length == 1:
        return rows
    result: ir.Value = op.Concat(rows, op.Slice(op.shape(like), [1], [length]), axis=0)
    return result


def reduce_places(
    op: Builder,
    data: ir.Value,
    indices: ir.Value,
    updates: ir.Value,
    reduction: str,
    *,
    is_within: bool = False,
) -> ir.Value:
    """``ScatterND(data, indices, updates, reduction)``, repeated indices included.

    A row is a number here, which an index that is out of range would make that of another row.

    Args:
        op: the builder.
        data: [*lead, *rest].
        indices: int64 [..., k]; the first k axes of ``data`` are ``lead``.
        updates: [..., *rest].
        reduction: ``"add"``, ``"mul"``, ``"max"`` or ``"min"``.
        is_within: whether no index is out of range, since the forward has read there.

    Raises:
        GraphError: the number of indexed axes is not known.
    """
    length, ranks = shapes.rank(data), (shapes.rank(indices), shapes.rank(updates))
    if length is None or ranks[0] is None or ranks[1] is None:
        raise GraphError(
            f"ScatterND with reduction {reduction!r}: how many axes it indexes is not known",
            because="onnxruntime loses updates of repeated indices, and without that number the "
            "operator cannot be spelled otherwise",
            help="give data, indices and updates a known rank",
        )
    axes = ranks[0] + length - 1 - ranks[1]
    shape = op.shape(data)
    row = outside = None
    for axis in range(axes):
        place = op.Gather(indices, np.int64(axis), axis=-1)
        size = op.Squeeze(op.dim(data, axis), [0])
        beyond = op.GreaterOrEqual(place, size)
        if not is_never_negative(indices):
            place = op.Where(op.Less(place, np.int64(0)), op.Add(place, size), place)
            beyond = op.Or(beyond, op.Less(place, np.int64(0)))
        outside = beyond if outside is None else op.Or(outside, beyond)
        row = place if row is None else op.Add(op.Mul(row, size), place)
    assert row is not None
    if not is_within:
        count = op.ReduceProd(op.Slice(shape, [0], [axes]), keepdims=0)
        row = op.Where(outside, count, row)
    if axes == 1:
        return _reduce_rows(op, data, row, updates, reduction)
    tail = [op.Slice(shape, [axes], [length])] if length > axes else []
    rows = op.Reshape(data, op.Concat([-1], *tail, axis=0))
    if rows.shape is None:
        rows.shape = ir.Shape([None] * (length - axes + 1))
    return op.Reshape(_reduce_rows(op, rows, row, updates, reduction), shape)

"""Adding at places that repeat, spelled so that every runtime adds all of them.

onnxruntime's ``ScatterND`` adds with several threads and without a lock: where an index repeats,
additions are lost (seen with 1.31: a table of 30,522 rows, 1,024 updates, 2 threads; off by whole
updates). ``ScatterElements`` adds one after the other: 3 ms more for 1,024 updates of 768.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder


def add_rows(op: Builder, data: ir.Value, indices: ir.Value, updates: ir.Value) -> ir.Value:
    """``data`` [V, *rest] with ``updates`` [..., *rest] added at the rows ``indices`` [...]."""
    length = shapes.rank(data)
    assert length is not None, "capture gives every value a rank"
    rest = length - 1
    flat = op.Reshape(op.cast(indices, ir.DataType.INT64), np.array([-1] + [1] * rest, np.int64))
    if shapes.rank(indices) != 1:
        tail = op.Slice(op.shape(data), [1], [length]) if rest else None
        target = [-1] if tail is None else op.Concat([-1], tail, axis=0)
        updates = op.Reshape(updates, target)
    places = op.Expand(flat, op.Shape(updates)) if rest else flat
    result: ir.Value = op.ScatterElements(data, places, updates, axis=0, reduction="add")
    return result


def add_places(op: Builder, data: ir.Value, indices: ir.Value, updates: ir.Value) -> ir.Value:
    """``ScatterND(data, indices, updates, reduction="add")``, repeated indices included.

    Args:
        op: the builder.
        data: [*lead, *rest].
        indices: int64 [..., k], k a constant; the first k axes of ``data`` are ``lead``.
        updates: [..., *rest].
    """
    known, length = shapes.dims(indices), shapes.rank(data)
    assert known is not None
    assert length is not None
    axes = known[-1]
    assert isinstance(axes, int), "the number of indexed axes is part of the operator's form"
    shape = op.shape(data)
    row = None
    for axis in range(axes):
        place = op.Gather(indices, np.int64(axis), axis=-1)
        size = op.Squeeze(op.dim(data, axis), [0])
        place = op.Where(op.Less(place, np.int64(0)), op.Add(place, size), place)
        row = place if row is None else op.Add(op.Mul(row, size), place)
    assert row is not None
    if axes == 1:
        return add_rows(op, data, row, updates)
    tail = [op.Slice(shape, [axes], [length])] if length > axes else []
    rows = op.Reshape(data, op.Concat([-1], *tail, axis=0))
    if rows.shape is None:
        rows.shape = ir.Shape([None] * (length - axes + 1))
    return op.Reshape(add_rows(op, rows, row, updates), shape)

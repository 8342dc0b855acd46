"""``EmbeddingBag``: sums, means and maxima of rows of a table."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortrain.capture.onnx.translations.base import Translator, aten, refuse, translation
from ortrain.capture.onnx.translations.nn import embedding
from ortrain.graph import shapes
from ortrain.graph.scatter import add_rows

_SUM, _MEAN, _MAX = range(3)


@translation(aten.embedding_bag.default, aten.embedding_bag.padding_idx)
def embedding_bag(
    op: Translator,
    weight: ir.Value,
    indices: ir.Value,
    offsets: ir.Value,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: ir.Value | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = -1,
) -> tuple[ir.Value, ...]:
    """The bags [B, H]; bag b has the indices [N] from offset b up to the next one.

    The three further results serve torch's own backward alone, and are empty here.
    """
    assert weight.dtype is not None
    padding = -1 if padding_idx is None else padding_idx
    rows = embedding(op, weight, indices, padding, scale_grad_by_freq, sparse)
    indices, offsets = (op.cast(value, ir.DataType.INT64) for value in (indices, offsets))
    if include_last_offset:
        offsets = op.Slice(offsets, [0], [-1], [0])
    count, bags = op.dim(indices, 0), op.dim(offsets, 0)
    bag = _bag_of_each(op, offsets, count)
    counted = op.Not(op.Equal(indices, padding))
    if mode == _MAX:
        if per_sample_weights is not None:
            raise refuse("EmbeddingBag of maxima with weights")
        result = _maxima(op, rows, bag, counted, count, bags)
    else:
        if per_sample_weights is not None:
            rows = op.Mul(rows, op.Unsqueeze(per_sample_weights, [1]))
        factor = op.cast(counted, weight.dtype)
        width = (shapes.dims(weight) or (None, None))[1]
        zeros = op.Expand(op.constant(0, weight.dtype), op.Concat(bags, op.dim(weight, 1), axis=0))
        zeros.shape = ir.Shape([None, width])
        result = add_rows(op, zeros, bag, op.Mul(rows, op.Unsqueeze(factor, [1])))
        if mode == _MEAN:
            none = op.Expand(op.constant(0, weight.dtype), bags)
            sizes = op.ScatterElements(none, bag, factor, axis=0, reduction="add")
            result = op.Div(result, op.Unsqueeze(op.Max(sizes, 1.0), [1]))
    unused = op.constant(np.zeros(0, np.int64))
    return result, unused, unused, unused


def _bag_of_each(op: Translator, offsets: ir.Value, count: ir.Value) -> ir.Value:
    """The bag that each index is in: how many offsets are not behind it, less one."""
    places = op.Expand(op.constant(0, ir.DataType.INT64), op.Add(count, 1))
    ones = op.Expand(op.constant(1, ir.DataType.INT64), op.shape(offsets))
    begun = op.ScatterElements(places, offsets, ones, axis=0, reduction="add")
    bag = op.Sub(op.CumSum(begun, op.constant(0, ir.DataType.INT64)), 1)
    return op.Slice(bag, [0], count, [0])


def _maxima(
    op: Translator,
    rows: ir.Value,
    bag: ir.Value,
    counted: ir.Value,
    count: ir.Value,
    bags: ir.Value,
) -> ir.Value:
    """The largest element of each column of a bag, the first where several are; 0 of none."""
    assert rows.dtype is not None
    shape = op.Shape(rows)
    wide = op.Expand(op.Unsqueeze(bag, [1]), shape)
    table = op.Concat(bags, op.Slice(shape, [1], [2], [0]), axis=0)
    fixed = op.ours("StopGradient", rows)
    lowest = op.constant(float("-inf"), rows.dtype)
    seen = op.Where(op.Unsqueeze(counted, [1]), fixed, lowest)
    start = op.Expand(lowest, table)
    largest = op.ScatterElements(start, wide, seen, axis=0, reduction="max")
    hit = op.And(
        op.Equal(op.GatherElements(largest, wide, axis=0), seen), op.Unsqueeze(counted, [1])
    )
    places = op.Unsqueeze(op.Range(op.constant(0, ir.DataType.INT64), op.Squeeze(count, [0]),
                                   op.constant(1, ir.DataType.INT64)), [1])  # fmt: skip
    first = op.ScatterElements(
        op.Expand(count, table), wide, op.Where(hit, places, count), axis=0, reduction="min"
    )
    empty = op.Equal(first, count)
    picked = op.GatherElements(rows, op.Where(empty, 0, first), axis=0)
    return op.Where(empty, 0.0, picked)

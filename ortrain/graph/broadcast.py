"""The transpose of numpy's broadcasting, by static shapes or at run time."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder


def unbroadcast(op: Builder, part: ir.Value, value: ir.Value, output: ir.Value) -> ir.Value:
    """Sums a gradient of the output's shape over the axes along which ``value`` was broadcast."""
    wide, narrow = shapes.dims(output), shapes.dims(value)
    known = shapes.dims(part)
    if known is not None and narrow is not None and known == narrow and None not in known:
        return part
    if wide is None or narrow is None:
        return _unbroadcast_at_run_time(op, part, value, output)
    lead = len(wide) - len(narrow)
    pairs = list(zip(wide[lead:], narrow, strict=True))
    ambiguous = any(
        n != 1 and not shapes.same(w, n) and not (isinstance(n, int) and n > 1) for w, n in pairs
    )
    if ambiguous:
        return _unbroadcast_at_run_time(op, part, value, output)
    repeated = [lead + i for i, (w, n) in enumerate(pairs) if n == 1 and w != 1]
    axes = [*range(lead), *repeated]
    if not axes:
        return part
    if not repeated:
        total: ir.Value = op.ReduceSum(part, axes, keepdims=0)
    else:
        total = op.ReduceSum(part, axes, keepdims=1)
        if lead:
            total = op.Squeeze(total, list(range(lead)))
    total.shape = value.shape
    return total


def _unbroadcast_at_run_time(
    op: Builder, part: ir.Value, value: ir.Value, output: ir.Value
) -> ir.Value:
    """The same where symbolic dimensions do not tell which axes were broadcast."""
    shape = op.Shape(value)
    length = shapes.rank(value)
    wide = shapes.rank(part) if part.shape is not None else shapes.rank(output)
    if wide is not None and wide == length:
        aligned = shape
    elif wide is not None and length is not None:
        aligned = op.Concat([1] * (wide - length), shape, axis=0)
    else:
        # ConstantOfShape rather than Expand, of which onnx infers the size 1 where it is 0.
        missing = op.Unsqueeze(op.Sub(op.Size(op.Shape(part)), op.Size(shape)), [0])
        ones = op.ConstantOfShape(missing, value=ir.tensor(np.array([1], np.int64)))
        aligned = op.Concat(ones, shape, axis=0)
    differs = op.Not(op.Equal(aligned, op.Shape(part)))
    axes = op.Reshape(op.NonZero(differs), [-1])
    axes.shape = ir.Shape([None])
    summed = op.ReduceSum(part, axes, keepdims=1, noop_with_empty_axes=1)
    result: ir.Value = op.Reshape(summed, shape, allowzero=1)
    result.shape = value.shape
    return result

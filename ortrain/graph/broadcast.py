"""The transpose of numpy's broadcasting, by static shapes or at run time."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.graph.reduction import reduced_count

# In which a count of elements is a number; of 16 bits it is rounded, or none.
_COUNTING = {ir.DataType.FLOAT, ir.DataType.DOUBLE}


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
    once, over = _repeated(part, axes)
    total: ir.Value = op.ReduceSum(once, axes, keepdims=bool(repeated))
    if repeated and lead:
        total = op.Squeeze(total, list(range(lead)))
    if over:
        count = reduced_count(op, part, op.constant(over, ir.DataType.INT64), total)
        # Of no tokens a mean's gradient is infinite, and the sum of none of it is zero.
        total = op.Where(op.Greater(count, 0), total * count, op.constant(0, total.dtype))
        total = op.Expand(total, op.Shape(value))  # it may repeat along the other axes, too
    total.shape = value.shape
    return total


def _repeated(part: ir.Value, axes: list[int]) -> tuple[ir.Value, list[int]]:
    """What a gradient repeats, and along which of the axes: its sum is a multiple of that.

    A mean over T tokens gives each the same gradient, and a bias before it their sum: onnxruntime
    adds T equal numbers one after another, and rounds T times.

    Returns:
        What is repeated and its axes; the gradient itself and none where it repeats nothing.
    """
    source, wide = part.producer(), shapes.dims(part)
    if source is None or source.domain or source.op_type != "Expand":
        return part, []
    once = source.inputs[0]
    narrow = shapes.dims(once)
    if once is None or narrow is None or wide is None or len(narrow) != len(wide):
        return part, []
    over = [axis for axis in axes if narrow[axis] == 1 != wide[axis]]
    others = [axis for axis in axes if axis not in over]
    if part.dtype not in _COUNTING or not all(shapes.same(narrow[i], wide[i]) for i in others):
        return part, []  # a symbol may be one as well
    return (once, over) if over else (part, [])


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

"""Operators that make tensors out of sizes and numbers."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from ortrain.runtime.aten.kernels.shape import MOST, by_bits, counted, is_open, number, sized
from ortrain.runtime.aten.lines import Raw
from ortrain.runtime.aten.operands import Size, Tensor
from ortrain.runtime.aten.table import kernel

DEVICE = Raw("device")
# Of an identity that is made once, not by each step.
MOST_ENTRIES = 1 << 16


@kernel("Shape")
def shape(t, data, *, start=0, end=None):
    """Of a tensor whose rank is not known; any other's is a row of sizes."""
    return t.call("late.shape", data, start, end)


@kernel("Size")
def size(t, data):
    """Likewise."""
    return t.call("late.count", data)


@kernel("ConstantOfShape")
def constant_of_shape(t, input, *, value=None):
    filled = np.zeros(1, np.float32) if value is None else np.asarray(value).reshape(-1)
    dtype, number = ir.DataType.from_numpy(filled.dtype), by_bits(filled)[0].item()
    if is_open(input):
        return t.call("late.full", input, number, dtype)
    sizes = t.ints(input)
    if not number and not math.copysign(1, number) < 0:
        return sized(t.zeros(sizes, dtype=dtype, device=DEVICE), sizes)
    return sized(t.full(sizes, number, dtype=dtype, device=DEVICE), sizes)


@kernel("Range")
def range_(t, start, limit, delta, *, stash_type=None):
    """Of nothing where the step leads away from the limit, which PyTorch refuses."""
    dtype, numbers = start.dtype, [number(n) for n in (start, limit, delta)]
    first, last, step = numbers
    if any(isinstance(n, Tensor) for n in numbers) or isinstance(step, Size):
        return sized(t.call("late.arange", *numbers, dtype, DEVICE), [None])
    if first == 0 and step == 1 and last in t.symbols.values():  # a size, never negative
        return sized(t.arange(last, dtype=dtype, device=DEVICE), [last])
    if isinstance(first, Size) or isinstance(last, Size):
        last = Size(f"{'max' if step > 0 else 'min'}({first}, {last})")
    else:
        array = np.arange(first, last, step)
        if array.size <= MOST:
            return t.constant_tensor(array.astype(dtype.numpy()), "range", dtype)
    return sized(t.arange(first, last, step, dtype=dtype, device=DEVICE), [None])


@kernel("EyeLike")
def eye_like(t, input, *, dtype=None, k=0):
    dtype = input.dtype if dtype is None else ir.DataType(dtype)
    rows, columns = t.tensor(input).shape
    if isinstance(rows, int) and isinstance(columns, int) and rows * columns <= MOST_ENTRIES:
        return t.constant_tensor(np.eye(rows, columns, k, dtype=dtype.numpy()), "eye", dtype)
    if not k:
        return sized(t.eye(rows, columns, dtype=dtype, device=DEVICE), [rows, columns])
    ones = t.ones([rows, columns], dtype=dtype, device=DEVICE)
    return sized(ones.triu(k).tril(k), [rows, columns])


@kernel("OneHot")
def one_hot(t, indices, depth, values, *, axis=-1):
    """A negative index counts from the end; one out of range is nowhere."""
    indices, values = t.tensor(indices), t.tensor(values)
    count = number(depth)
    if isinstance(count, Tensor):
        whole = count.reshape([]).to(ir.DataType.INT64)
        whole.dims = ()
        (count,) = t.ints(whole)
    count = int(count) if isinstance(count, float) else count
    axis %= indices.rank + 1
    column = [1] * (indices.rank + 1)
    column[axis] = -1
    places = counted(t, count).view(*column)
    wrapped = t.where(t.lt(indices, 0), t.add(indices, count), indices)
    hit = t.eq(wrapped.unsqueeze(axis), places)
    dims = [*indices.dims[:axis], count, *indices.dims[axis:]]
    if values.array is None:
        off, on = values.unbind(outputs=2)
    elif (values.array == (0, 1)).all():
        return sized(hit.to(values.dtype), dims)
    else:
        off, on = (t.constant_tensor(np.asarray(n), "value", values.dtype) for n in values.array)
    return sized(t.where(hit, on, off), dims)

"""Pooling, over windows of one size and over windows that adapt to the result's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from ortrain.capture.onnx.translations.base import Size, Translator, aten, symbolic, translation
from ortrain.capture.onnx.translations.conv import spread
from ortrain.graph import shapes
from ortrain.graph.indices import from_the_start

Window = int | Sequence[int]


def _batched(
    op: Translator, value: ir.Value, count: int, pooled: Callable[[ir.Value], ir.Value]
) -> ir.Value:
    """``pooled`` of a value with ``count`` spatial axes, whether or not it has a batch axis."""
    if shapes.rank(value) == count + 2:
        return pooled(value)
    return op.Squeeze(pooled(op.Unsqueeze(value, [0])), [0])


# -- maxima --------------------------------------------------------------------------------------

_MAXIMUM = {
    aten.max_pool1d.default: 1,
    aten.max_pool2d.default: 2,
    aten.max_pool3d.default: 3,
}
_MAXIMUM_WITH_INDICES = {
    aten.max_pool1d_with_indices.default: 1,
    aten.max_pool2d_with_indices.default: 2,
    aten.max_pool3d_with_indices.default: 3,
}


def _max_pool(count: int) -> Callable[..., ir.Value]:
    def pool(
        op: Translator,
        self: ir.Value,
        kernel_size: Window,
        stride: Window = (),
        padding: Window = 0,
        dilation: Window = 1,
        ceil_mode: bool = False,
    ) -> ir.Value:
        options = _max_pool_options(count, kernel_size, stride, padding, dilation, ceil_mode)
        return _batched(op, self, count, lambda batch: op.MaxPool(batch, **options))

    return pool


def _max_pool_with_indices(count: int) -> Callable[..., tuple[ir.Value, ir.Value]]:
    def pool(
        op: Translator,
        self: ir.Value,
        kernel_size: Window,
        stride: Window = (),
        padding: Window = 0,
        dilation: Window = 1,
        ceil_mode: bool = False,
    ) -> tuple[ir.Value, ir.Value]:
        options = _max_pool_options(count, kernel_size, stride, padding, dilation, ceil_mode)
        alone = shapes.rank(self) == count + 1
        batch = op.Unsqueeze(self, [0]) if alone else self
        value, index = op.MaxPool(batch, outputs=2, **options)
        index = op.Mod(index, _plane(op, self, count))  # ONNX counts over the whole tensor
        return (op.Squeeze(value, [0]), op.Squeeze(index, [0])) if alone else (value, index)

    return pool


def _max_pool_options(
    count: int,
    kernel_size: Window,
    stride: Window,
    padding: Window,
    dilation: Window,
    ceil_mode: bool,
) -> dict[str, list[int] | int]:
    kernel = spread(kernel_size, count)
    return {
        "kernel_shape": kernel,
        "strides": spread(stride, count) if stride else kernel,
        "pads": spread(padding, count) * 2,
        "dilations": spread(dilation, count),
        "ceil_mode": int(ceil_mode),
    }


def _plane(op: Translator, value: ir.Value, count: int) -> ir.Value:
    """How many elements the last axes have, as an int64 scalar."""
    size = op.constant(np.int64(1))
    for axis in range(-count, 0):
        size = op.Mul(size, op.Squeeze(op.dim(value, axis), [0]))
    return size


for _target, _count in _MAXIMUM.items():
    translation(_target)(_max_pool(_count))
for _target, _count in _MAXIMUM_WITH_INDICES.items():
    translation(_target)(_max_pool_with_indices(_count))


@translation(aten.max_unpool2d.default, aten.max_unpool3d.default)
def max_unpool(
    op: Translator, self: ir.Value, indices: ir.Value, output_size: Sequence[Size], *rest: Window
) -> ir.Value:
    """Zeros with each value at its index in its plane."""
    length, count = shapes.rank(self), len(output_size)
    assert length is not None
    assert self.dtype is not None
    lead = [op.dim(self, axis) for axis in range(length - count)]
    size = op.sizes(output_size)
    plane = op.ReduceProd(size, keepdims=1)
    zeros = op.Expand(op.constant(0, self.dtype), op.Concat(*lead, plane, axis=0))
    zeros.shape = ir.Shape([*(shapes.dims(self) or ())[: length - count], None])
    flat = op.constant(np.array([0] * (length - count) + [-1], np.int64))
    places, values = op.Reshape(from_the_start(op, indices), flat), op.Reshape(self, flat)
    whole = op.ScatterElements(zeros, places, values, axis=length - count)
    return op.Reshape(whole, op.Concat(*lead, size, axis=0))


# -- averages ------------------------------------------------------------------------------------

_AVERAGE = {
    aten.avg_pool1d.default: 1,
    aten.avg_pool2d.default: 2,
    aten.avg_pool3d.default: 3,
}


def _average_pool(count: int) -> Callable[..., ir.Value]:
    def pool(
        op: Translator,
        self: ir.Value,
        kernel_size: Window,
        stride: Window = (),
        padding: Window = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> ir.Value:
        kernel = spread(kernel_size, count)
        strides = spread(stride, count) if stride else kernel
        padded = spread(padding, count)
        if ceil_mode:  # one window, larger than the axis
            known = (shapes.dims(self) or ())[-count:]
            kernel = [
                min(k, size + 2 * p) if isinstance(size, int) else k
                for k, size, p in zip(kernel, known, padded, strict=True)
            ]
        over = _overhang(self, kernel, strides, padded) if ceil_mode else [0] * count
        form = {"kernel_shape": kernel, "strides": strides}
        pads = padded * 2

        def averaged(batch: ir.Value) -> ir.Value:
            if any(over):
                ends = [p + o for p, o in zip(padded, over, strict=True)]
                around = op.constant(np.array([0, 0, *padded, 0, 0, *ends], np.int64))
                mean = op.AveragePool(op.Pad(batch, around), **form)
                if divisor_override is None:
                    return op.Mul(mean, _shares(op, self, form, padded, over, count_include_pad))
            elif divisor_override is None:
                return op.AveragePool(
                    batch, pads=pads, count_include_pad=int(count_include_pad), **form
                )
            else:
                mean = op.AveragePool(batch, pads=pads, count_include_pad=1, **form)
            return op.Mul(mean, math.prod(kernel) / divisor_override)

        return _batched(op, self, count, averaged)

    return pool


for _target, _count in _AVERAGE.items():
    translation(_target)(_average_pool(_count))


def _overhang(
    value: ir.Value, kernel: list[int], strides: list[int], padded: list[int]
) -> list[int]:
    """By how much the last window of ``ceil_mode`` hangs over the padded end of each axis."""
    known = (shapes.dims(value) or ())[-len(kernel) :]
    result = []
    for size, k, s, p in zip(known, kernel, strides, padded, strict=True):
        if not isinstance(size, int):
            if s == 1:
                result.append(0)
                continue
            raise symbolic("average pooling with ceil_mode")
        last = -(-(size + 2 * p - k) // s)
        if last * s >= size + p:  # a window has to begin within the axis or its padding in front
            last -= 1
        result.append(max(0, last * s + k - size - 2 * p))
    return result


def _shares(
    op: Translator,
    value: ir.Value,
    form: dict[str, list[int]],
    padded: list[int],
    over: list[int],
    count_include_pad: bool,
) -> ir.Value:
    """What a mean over whole windows is to be multiplied with, so that it divides by what counts.

    The overhang never counts, the padding where it is asked for.
    """
    assert value.dtype is not None
    table = np.ones(())
    known = (shapes.dims(value) or ())[-len(padded) :]
    rows = zip(known, form["kernel_shape"], form["strides"], padded, over, strict=True)
    for size, k, s, p, o in rows:
        assert isinstance(size, int)
        counts = np.zeros(size + 2 * p + o)
        counts[: size + 2 * p] = 1
        if not count_include_pad:
            counts[:p] = counts[size + p :] = 0
        starts = range(0, len(counts) - k + 1, s)
        table = table[..., None] * np.array([k / max(1, counts[i : i + k].sum()) for i in starts])
    return op.constant(table, value.dtype)


# -- adaptive windows: window i of n, over an axis of size L, goes from floor(i L / n) to
#    ceil((i + 1) L / n) --------------------------------------------------------------------------


@translation(
    aten.adaptive_avg_pool1d.default,
    aten.adaptive_avg_pool2d.default,
    aten.adaptive_avg_pool3d.default,
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool3d.default,
)
def adaptive_average_pool(
    op: Translator, self: ir.Value, output_size: Sequence[Size | None]
) -> ir.Value:
    known = shapes.dims(self)
    assert known is not None
    count = len(output_size)
    spatial = known[-count:]
    if all(isinstance(size, int) and size == 1 for size in output_size):
        return op.ReduceMean(self, list(range(-count, 0)), keepdims=1)
    tiles = _tiles(spatial, output_size)
    if tiles is not None:
        return _batched(
            op, self, count, lambda batch: op.AveragePool(batch, kernel_shape=tiles, strides=tiles)
        )
    result = self
    for axis, size in zip(range(-count, 0), output_size, strict=True):
        if size is None or (isinstance(size, int) and size == known[axis]):
            continue
        matrix = _averaging(op, self, axis, size)  # [size, L]
        if axis == -1:
            result = op.MatMul(result, op.Transpose(matrix, perm=[1, 0]))
        elif axis == -2:
            result = op.MatMul(matrix, result)
        else:
            order = [*range(len(known) - 3), len(known) - 2, len(known) - 1, len(known) - 3]
            last = op.MatMul(op.Transpose(result, perm=order), op.Transpose(matrix, perm=[1, 0]))
            result = op.Transpose(last, perm=np.argsort(order).tolist())
    return result


def _tiles(spatial: Sequence[shapes.Dim], output_size: Sequence[Size | None]) -> list[int] | None:
    """The windows' sizes, where they are all the same and cover each axis side by side."""
    tiles = []
    for dim, size in zip(spatial, output_size, strict=True):
        if size is None:
            tiles.append(1)
        elif isinstance(dim, int) and isinstance(size, int) and size and dim % size == 0 and dim:
            tiles.append(dim // size)
        else:
            return None
    return tiles


def _bounds(op: Translator, value: ir.Value, axis: int, size: Size) -> tuple[ir.Value, ir.Value]:
    """Where each of ``size`` windows along an axis begins, and where it ends: int64 [size]."""
    length = op.Squeeze(op.dim(value, axis), [0])
    count = size if isinstance(size, ir.Value) else op.constant(np.int64(size))
    places = op.Range(np.int64(0), count, np.int64(1))
    starts = op.Div(op.Mul(places, length), count)
    upper = op.Add(op.Mul(op.Add(places, 1), length), op.Sub(count, 1))
    return starts, op.Div(upper, count)


def _averaging(op: Translator, value: ir.Value, axis: int, size: Size) -> ir.Value:
    """The matrix [size, L] whose product with a vector averages its windows."""
    assert value.dtype is not None
    starts, ends = (op.Unsqueeze(v, [1]) for v in _bounds(op, value, axis, size))
    places = op.Range(np.int64(0), op.Squeeze(op.dim(value, axis), [0]), np.int64(1))
    inside = op.And(op.GreaterOrEqual(places, starts), op.Less(places, ends))
    return op.Div(op.cast(inside, value.dtype), op.cast(op.Sub(ends, starts), value.dtype))


@translation(
    aten.adaptive_max_pool1d.default,
    aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool3d.default,
)
def adaptive_max_pool(
    op: Translator, self: ir.Value, output_size: Sequence[Size | None]
) -> tuple[ir.Value, ir.Value]:
    """The first maximum of each window, and its place in the plane."""
    known = shapes.dims(self)
    assert known is not None
    count, length = len(output_size), len(known)
    tiles = _tiles(known[-count:], output_size)
    if tiles is not None:
        result: tuple[ir.Value, ir.Value] = _max_pool_with_indices(count)(op, self, tiles)
        return result
    lead = length - count
    windows, flat, sizes = self, op.constant(np.int64(0)), []
    for i, given in enumerate(output_size):
        axis = i - count
        size = op.Squeeze(op.dim(self, axis), [0]) if given is None else given
        starts, ends = (op.Unsqueeze(v, [1]) for v in _bounds(op, self, axis, size))
        # No window is longer than the longest; a shorter one has its last place several times.
        longest = op.ReduceMax(op.Sub(ends, starts), keepdims=0)
        steps = op.Range(np.int64(0), longest, np.int64(1))
        places = op.Min(op.Add(starts, steps), op.Sub(ends, 1))  # [size, longest]
        windows = op.Gather(windows, places, axis=lead + 2 * i)
        own = [j for j in range(2 * count) if j not in (2 * i, 2 * i + 1)]
        row = op.Mul(flat, op.Squeeze(op.dim(self, axis), [0]))
        flat = op.Add(row, op.Unsqueeze(places, own))
        sizes.append(op.index(size))
    # [*lead, size, window, size, window, …] → [*lead, *sizes, all of the window]
    spread_out = [lead + 2 * i for i in range(count)], [lead + 2 * i + 1 for i in range(count)]
    order = [*range(lead), *itertools.chain(*spread_out)]
    target = op.Concat(*(op.dim(self, axis) for axis in range(lead)), *sizes, [-1], axis=0)
    windows = op.Reshape(op.Transpose(windows, perm=order), target)
    windows.shape = ir.Shape(
        [*known[:lead], *(s if isinstance(s, int) else None for s in output_size), None]
    )
    first = op.ArgMax(windows, axis=-1, keepdims=1)
    places = op.Transpose(flat, perm=[axis - lead for axis in order[lead:]])
    places = op.Reshape(places, op.Concat(*sizes, [-1], axis=0))
    index = op.GatherElements(op.Expand(places, op.Shape(windows)), first, axis=length)
    maximum = op.GatherElements(windows, first, axis=length)
    return op.Squeeze(maximum, [-1]), op.Squeeze(index, [-1])

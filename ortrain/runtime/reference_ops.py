"""Operators of ``onnx.reference`` done over, where upstream's lack outputs, err, or crawl.

- ``MaxPool``: indices for every form; upstream's are wrong with padding or without a square window.
- ``AveragePool``: upstream pads both sides in ceil mode, where the standard pads the end only.
- ``Conv``, ``ConvTranspose``: any number of axes and groups, vectorized.
- ``ScatterND``, ``ScatterElements``: vectorized; upstream loops over every element in Python.
- ``GatherElements``: fewer indices than data along the other axes.
- ``Pad``: negative pads, which crop.
- ``Mean``: broadcasting.
- ``GroupNormalization``, ``LayerNormalization``: in float64; upstream's compute in float32, or
  return statistics in the wrong dtype.
- ``LpNormalization``: p = 1 of negative numbers.
- ``Erf``: in float64; upstream's is float32.
- ``LogSoftmax``: of numbers far apart; upstream takes the logarithm of a softmax of zero.
- ``LpPool``: pads, dilations and ceil mode; ``GlobalMaxPool``: other than two axes.
- ``LRN``: upstream leaves the second half of the channels as they were.
- ``ReduceSumSquare``: integers in their own dtype.
- ``BitShift``: shifts of 0-dimensional arrays.
- ``Resize``: where coordinates follow from the size of the result, upstream takes it to be the
  scale times the size before, which may be between two whole numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_resize import Resize as UpstreamResize

Array = np.ndarray


def _explicit_pads(
    auto_pad: str | None,
    pads: Sequence[int] | None,
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> list[tuple[int, int]]:
    """(begin, end) for each spatial axis, ``auto_pad`` resolved."""
    rank = len(kernel)
    if auto_pad == "VALID":
        return [(0, 0)] * rank
    if auto_pad not in ("SAME_UPPER", "SAME_LOWER"):
        flat = list(pads) if pads else [0] * (2 * rank)
        return list(zip(flat[:rank], flat[rank:], strict=True))
    result = []
    for size, k, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        total = max(0, (-(-size // stride) - 1) * stride + (k - 1) * dilation + 1 - size)
        small, large = total // 2, total - total // 2
        result.append((small, large) if auto_pad == "SAME_UPPER" else (large, small))
    return result


def _padded(x: Array, pads: Sequence[tuple[int, int]], value: Any) -> Array:
    return np.pad(x, [(0, 0), (0, 0), *pads], constant_values=value)


def _windows(
    x: Array, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> Array:
    """[N, C, *spatial] → [N, C, *positions, *kernel], without a copy."""
    rank = len(kernel)
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    view = sliding_window_view(x, spans, axis=tuple(range(2, 2 + rank)))
    steps = [slice(None, None, s) for s in (*strides, *dilations)]
    return view[(slice(None), slice(None), *steps)]


def _with_ceil(
    pads: list[tuple[int, int]],
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> list[tuple[int, int]]:
    """The end pads of ceil mode: a last window may hang over, but must start inside."""
    result = []
    rows = zip(pads, sizes, kernel, strides, dilations, strict=True)
    for (begin, end), size, k, stride, dilation in rows:
        span = (k - 1) * dilation + 1
        count = math.ceil((size + begin + end - span) / stride) + 1
        if (count - 1) * stride >= size + begin:
            count -= 1
        result.append((begin, max(end, (count - 1) * stride + span - size - begin)))
    return result


class MaxPool(OpRun):  # noqa: D101
    op_domain = ""

    def _run(
        self,
        x: Array,
        auto_pad: str | None = None,
        ceil_mode: int | None = None,
        dilations: Sequence[int] | None = None,
        kernel_shape: Sequence[int] = (),
        pads: Sequence[int] | None = None,
        storage_order: int | None = None,
        strides: Sequence[int] | None = None,
    ) -> tuple[Array, ...]:
        rank, sizes = len(kernel_shape), x.shape[2:]
        strides, dilations = strides or [1] * rank, dilations or [1] * rank
        around = _explicit_pads(auto_pad, pads, sizes, kernel_shape, strides, dilations)
        if ceil_mode:
            around = _with_ceil(around, sizes, kernel_shape, strides, dilations)
        low = -np.inf if np.issubdtype(x.dtype, np.floating) else np.iinfo(x.dtype).min
        values = _windows(_padded(x, around, low), kernel_shape, strides, dilations)
        numbers = np.arange(x.size).reshape(x.shape)
        if storage_order:
            plane = np.arange(math.prod(sizes)).reshape(sizes[::-1]).transpose()
            offset = np.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *[1] * rank)
            numbers = plane + offset * math.prod(sizes)
        places = _windows(_padded(numbers, around, -1), kernel_shape, strides, dilations)
        flat = values.reshape(*values.shape[: 2 + rank], math.prod(kernel_shape))
        best, numbered = flat.argmax(-1)[..., None], places.reshape(flat.shape)
        largest = np.take_along_axis(flat, best, -1)
        inside = (flat == largest) & (numbered >= 0)  # what is around may be as small
        best = np.where(inside.any(-1, keepdims=True), inside.argmax(-1)[..., None], best)
        y, index = largest[..., 0], np.take_along_axis(numbered, best, -1)[..., 0]
        return (y,) if len(self.onnx_node.output) == 1 else (y, index.astype(np.int64))


class AveragePool(OpRun):  # noqa: D101
    op_domain = ""

    def _run(
        self,
        x: Array,
        auto_pad: str | None = None,
        ceil_mode: int | None = None,
        count_include_pad: int | None = None,
        dilations: Sequence[int] | None = None,
        kernel_shape: Sequence[int] = (),
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> tuple[Array, ...]:
        rank, sizes = len(kernel_shape), x.shape[2:]
        strides, dilations = strides or [1] * rank, dilations or [1] * rank
        around = _explicit_pads(auto_pad, pads, sizes, kernel_shape, strides, dilations)
        counted = _padded(np.ones((1, 1, *sizes), x.dtype), around, 1 if count_include_pad else 0)
        if ceil_mode:
            wide = _with_ceil(around, sizes, kernel_shape, strides, dilations)
            extra = [(0, w[1] - a[1]) for w, a in zip(wide, around, strict=True)]
            counted, around = _padded(counted, extra, 0), wide
        axes = tuple(range(2 + rank, 2 + 2 * rank))
        sums = _windows(_padded(x, around, 0), kernel_shape, strides, dilations).sum(axes)
        counts = _windows(counted, kernel_shape, strides, dilations).sum(axes)
        return ((sums / counts).astype(x.dtype),)


class LpPool(OpRun):  # noqa: D101
    op_domain = ""

    def _run(
        self,
        x: Array,
        auto_pad: str | None = None,
        ceil_mode: int | None = None,
        dilations: Sequence[int] | None = None,
        kernel_shape: Sequence[int] = (),
        p: int | None = None,
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> tuple[Array, ...]:
        rank, sizes, power = len(kernel_shape), x.shape[2:], p or 2
        strides, dilations = strides or [1] * rank, dilations or [1] * rank
        around = _explicit_pads(auto_pad, pads, sizes, kernel_shape, strides, dilations)
        if ceil_mode:
            around = _with_ceil(around, sizes, kernel_shape, strides, dilations)
        windows = _windows(_padded(np.abs(x), around, 0), kernel_shape, strides, dilations)
        sums = (windows**power).sum(tuple(range(2 + rank, 2 + 2 * rank)))
        return ((sums ** (1 / power)).astype(x.dtype),)


class GlobalMaxPool(OpRun):  # noqa: D101
    op_domain = ""

    def _run(self, x: Array) -> tuple[Array, ...]:
        return (x.max(tuple(range(2, x.ndim)), keepdims=True),)


class LRN(OpRun):  # noqa: D101
    op_domain = ""

    def _run(
        self,
        x: Array,
        alpha: float | None = None,
        beta: float | None = None,
        bias: float | None = None,
        size: int = 1,
    ) -> tuple[Array, ...]:
        around = [(0, 0), ((size - 1) // 2, size // 2), *[(0, 0)] * (x.ndim - 2)]
        sums = sliding_window_view(np.pad(np.square(x), around), size, axis=1).sum(-1)
        shrunk = (1.0 if bias is None else bias) + (1e-4 if alpha is None else alpha) / size * sums
        return ((x / shrunk ** (0.75 if beta is None else beta)).astype(x.dtype),)


class LogSoftmax(OpRun):  # noqa: D101
    op_domain = ""

    def _run(self, x: Array, axis: int | None = None) -> tuple[Array, ...]:
        axis = -1 if axis is None else axis
        wide = x.astype(np.promote_types(x.dtype, np.float32))
        away = wide - wide.max(axis, keepdims=True, initial=-np.inf)
        return ((away - np.log(np.exp(away).sum(axis, keepdims=True))).astype(x.dtype),)


class ReduceSumSquare(OpRun):  # noqa: D101
    op_domain = ""

    def _run(
        self,
        x: Array,
        axes: Array | Sequence[int] | None = None,
        keepdims: int | None = None,
        noop_with_empty_axes: int | None = None,
    ) -> tuple[Array, ...]:
        picked = tuple(int(a) for a in axes) if axes is not None else ()
        square = np.square(x)
        if not picked and noop_with_empty_axes:
            return (square,)
        keep = keepdims is None or bool(keepdims)
        return (np.asarray(square.sum(picked or None, dtype=x.dtype, keepdims=keep)),)


class Conv(OpRun):  # noqa: D101
    op_domain = ""

    def _run(
        self,
        x: Array,
        w: Array,
        b: Array | None = None,
        auto_pad: str | None = None,
        dilations: Sequence[int] | None = None,
        group: int | None = None,
        kernel_shape: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> tuple[Array, ...]:
        kernel, rank, groups = w.shape[2:], w.ndim - 2, group or 1
        strides, dilations = strides or [1] * rank, dilations or [1] * rank
        around = _explicit_pads(auto_pad, pads, x.shape[2:], kernel, strides, dilations)
        view = _windows(_padded(x, around, 0), kernel, strides, dilations)
        taps = tuple(range(2 + rank, 2 + 2 * rank))
        parts = []
        for columns, rows in zip(np.split(view, groups, 1), np.split(w, groups, 0), strict=True):
            part = np.tensordot(columns, rows, ((1, *taps), (1, *range(2, 2 + rank))))
            parts.append(np.moveaxis(part, -1, 1))
        y = np.concatenate(parts, 1)
        if b is not None:
            y = y + b.reshape(-1, *[1] * rank)
        return (y.astype(x.dtype),)


class ConvTranspose(OpRun):  # noqa: D101
    op_domain = ""

    def _run(
        self,
        x: Array,
        w: Array,
        b: Array | None = None,
        auto_pad: str | None = None,
        dilations: Sequence[int] | None = None,
        group: int | None = None,
        kernel_shape: Sequence[int] | None = None,
        output_padding: Sequence[int] | None = None,
        output_shape: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> tuple[Array, ...]:
        kernel, rank, groups = w.shape[2:], w.ndim - 2, group or 1
        strides, dilations = strides or [1] * rank, dilations or [1] * rank
        extra = list(output_padding or [0] * rank)
        sizes = x.shape[2:]
        full = [
            (n - 1) * s + (k - 1) * d + 1 + e
            for n, s, k, d, e in zip(sizes, strides, kernel, dilations, extra, strict=True)
        ]
        flat = list(pads) if pads else [0] * (2 * rank)
        around = list(zip(flat[:rank], flat[rank:], strict=True))
        if output_shape or auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            wanted = output_shape or [n * s for n, s in zip(sizes, strides, strict=True)]
            around = []
            for have, want in zip(full, wanted, strict=True):
                total = max(0, have - want)
                small, large = total // 2, total - total // 2
                around.append((small, large) if auto_pad == "SAME_UPPER" else (large, small))
            if output_shape:  # beyond the windows' reach there are zeros
                full = [max(have, want) for have, want in zip(full, wanted, strict=True)]
        y = np.zeros((x.shape[0], w.shape[1] * groups, *full), x.dtype)
        for g, (part, weight) in enumerate(
            zip(np.split(x, groups, 1), np.split(w, groups, 0), strict=True)
        ):
            channels = slice(g * w.shape[1], (g + 1) * w.shape[1])
            for tap in np.ndindex(*kernel):
                places = tuple(
                    slice(t * d, t * d + (n - 1) * s + 1, s)
                    for t, d, n, s in zip(tap, dilations, sizes, strides, strict=True)
                )
                product = np.tensordot(part, weight[(slice(None), slice(None), *tap)], ((1,), (0,)))
                y[(slice(None), channels, *places)] += np.moveaxis(product, -1, 1)
        crop = tuple(slice(b, n - e) for (b, e), n in zip(around, full, strict=True))
        y = y[(slice(None), slice(None), *crop)]
        if b is not None:
            y = y + b.reshape(-1, *[1] * rank)
        return (y.astype(x.dtype),)


_AT = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def _scatter(
    data: Array, places: tuple[Array, ...], updates: Array, reduction: str | None
) -> Array:
    result = np.copy(data)
    if reduction in (None, "none"):
        result[places] = updates
    else:
        _AT[str(reduction)].at(result, places, updates)
    return result


class ScatterND(OpRun):  # noqa: D101
    op_domain = ""

    def _run(
        self, data: Array, indices: Array, updates: Array, reduction: str | None = None
    ) -> tuple[Array, ...]:
        return (_scatter(data, tuple(np.moveaxis(indices, -1, 0)), updates, reduction),)


class ScatterElements(OpRun):  # noqa: D101
    op_domain = ""

    def _run(
        self,
        data: Array,
        indices: Array,
        updates: Array,
        axis: int | None = None,
        reduction: str | None = None,
    ) -> tuple[Array, ...]:
        axis = (axis or 0) % data.ndim
        places: list[Array] = list(np.indices(indices.shape, sparse=True))
        places[axis] = np.where(indices < 0, indices + data.shape[axis], indices)
        return (_scatter(data, tuple(places), updates, reduction),)


class GatherElements(OpRun):  # noqa: D101
    op_domain = ""

    def _run(self, data: Array, indices: Array, axis: int | None = None) -> tuple[Array, ...]:
        axis = (axis or 0) % data.ndim
        places: list[Array] = list(np.indices(indices.shape, sparse=True))
        places[axis] = np.where(indices < 0, indices + data.shape[axis], indices)
        return (data[tuple(places)],)


class Pad(OpRun):  # noqa: D101
    op_domain = ""

    def _run(
        self,
        x: Array,
        pads: Array,
        value: Array | None = None,
        axes: Array | None = None,
        mode: str | None = None,
    ) -> tuple[Array, ...]:
        around = [(0, 0)] * x.ndim
        picked = range(x.ndim) if axes is None else [int(a) for a in axes]
        for i, axis in enumerate(picked):
            around[axis] = (int(pads[i]), int(pads[i + len(pads) // 2]))
        crop = tuple(
            slice(max(-low, 0), size - max(-high, 0))
            for (low, high), size in zip(around, x.shape, strict=True)
        )
        grown = [(max(low, 0), max(high, 0)) for low, high in around]
        kind: Any = mode or "constant"
        if kind == "constant":
            fill = 0 if value is None else value.reshape(()).astype(x.dtype)
            return (np.pad(x[crop], grown, constant_values=fill),)
        return (np.pad(x[crop], grown, mode=kind),)


class Mean(OpRun):  # noqa: D101
    op_domain = ""

    def _run(self, *arrays: Array) -> tuple[Array, ...]:
        total = arrays[0]
        for other in arrays[1:]:
            total = total + other
        return ((total / len(arrays)).astype(total.dtype),)


def _standardized(x: Array, axes: tuple[int, ...], epsilon: float) -> tuple[Array, Array, Array]:
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    mean = wide.mean(axes, keepdims=True)
    inverse = 1 / np.sqrt(np.square(wide - mean).mean(axes, keepdims=True) + epsilon)
    return (wide - mean) * inverse, mean, inverse


class LayerNormalization(OpRun):  # noqa: D101
    op_domain = ""

    def _run(
        self,
        x: Array,
        scale: Array,
        bias: Array | None = None,
        axis: int = -1,
        epsilon: float = 1e-5,
        stash_type: int | None = None,
    ) -> tuple[Array, ...]:
        axes = tuple(range(axis % x.ndim, x.ndim))
        n, mean, inverse = _standardized(x, axes, float(epsilon))
        y = n.astype(x.dtype) * scale
        return ((y if bias is None else y + bias).astype(x.dtype), mean, inverse)


class GroupNormalization(OpRun):  # noqa: D101
    op_domain = ""

    def _run(
        self,
        x: Array,
        scale: Array,
        bias: Array,
        epsilon: float = 1e-5,
        num_groups: int = 1,
        stash_type: int | None = None,
    ) -> tuple[Array, ...]:
        n, _, _ = _standardized(x.reshape(x.shape[0], num_groups, -1), (2,), float(epsilon))
        repeats = x.shape[1] // len(scale)  # above 1 where they belong to groups, before opset 21
        column = (-1, *[1] * (x.ndim - 2))
        scale, bias = (v.repeat(repeats).reshape(column) for v in (scale, bias))
        return ((n.reshape(x.shape) * scale + bias).astype(x.dtype),)


class LpNormalization(OpRun):  # noqa: D101
    op_domain = ""

    def _run(self, x: Array, axis: int | None = None, p: int | None = None) -> tuple[Array, ...]:
        power, wide = p or 2, x.astype(np.promote_types(x.dtype, np.float32))
        over = -1 if axis is None else axis
        norm = (np.abs(wide) ** power).sum(over, keepdims=True) ** (1 / power)
        return (np.where(norm == 0, 0, wide / norm).astype(x.dtype),)


class Erf(OpRun):  # noqa: D101
    op_domain = ""

    def _run(self, x: Array) -> tuple[Array, ...]:
        return (np.vectorize(math.erf, otypes=[np.float64])(x).astype(x.dtype),)


class Resize(UpstreamResize):  # noqa: D101
    op_domain = ""

    def _run(  # type: ignore[override]
        self,
        x: Array,
        roi: Array | None = None,
        scales: Array | None = None,
        sizes: Array | None = None,
        axes: Sequence[int] | None = None,
        coordinate_transformation_mode: str | None = None,
        **form: Any,
    ) -> tuple[Array, ...]:
        by_sizes = coordinate_transformation_mode in ("align_corners", "tf_crop_and_resize")
        if by_sizes and scales is not None and scales.size:
            before = np.array(x.shape if axes is None else [x.shape[axis] for axis in axes])
            sizes, scales = (scales * before).astype(np.int64), None
        form["coordinate_transformation_mode"] = coordinate_transformation_mode
        found: tuple[Array, ...] = super()._run(x, roi, scales, sizes, axes=axes, **form)
        return found


class BitShift(OpRun):  # noqa: D101
    op_domain = ""

    def _run(self, x: Array, y: Array, direction: str | None = None) -> tuple[Array, ...]:
        return (np.asarray(np.right_shift(x, y) if direction == "RIGHT" else np.left_shift(x, y)),)


OPERATORS: tuple[type[OpRun], ...] = (
    AveragePool, BitShift, Conv, ConvTranspose, Erf, GatherElements, GlobalMaxPool,
    GroupNormalization, LayerNormalization, LogSoftmax, LpNormalization, LpPool, LRN, MaxPool, Mean,
    Pad, ReduceSumSquare, Resize, ScatterElements, ScatterND,
)  # fmt: skip

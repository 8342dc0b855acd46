"""Interpolation: which places of the input each element of the result takes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from ortrain.capture.onnx.translations.base import Size, Translator, aten, refuse, translation
from ortrain.graph import shapes

Sizes = Sequence[Size] | None
Factors = Sequence[float] | None


@translation(aten.upsample_nearest1d.vec, aten.upsample_nearest2d.vec, aten.upsample_nearest3d.vec)
def nearest(
    op: Translator, input: ir.Value, output_size: Sizes, scale_factors: Factors
) -> ir.Value:
    return _nearest(op, input, output_size, scale_factors, 0.0)


@translation(
    aten._upsample_nearest_exact1d.vec,
    aten._upsample_nearest_exact2d.vec,
    aten._upsample_nearest_exact3d.vec,
)
def nearest_exact(
    op: Translator, input: ir.Value, output_size: Sizes, scale_factors: Factors
) -> ir.Value:
    return _nearest(op, input, output_size, scale_factors, 0.5)


def _nearest(
    op: Translator, x: ir.Value, sizes: Sizes, factors: Factors, centre: float
) -> ir.Value:
    """``Resize`` by whole numbers, which every kernel agrees on, and else by index."""
    known = shapes.dims(x)
    assert known is not None
    ratios = factors
    if ratios is None:
        assert sizes is not None
        pairs = zip(known[2:], sizes, strict=True)
        ratios = [b / a if isinstance(a, int) and isinstance(b, int) else 0.0 for a, b in pairs]
    single = x.dtype is not ir.DataType.DOUBLE
    if not centre and single and all(map(_is_whole, ratios)):
        scales = op.constant(np.array([1, 1, *ratios], np.float32))
        return op.Resize(
            x, None, scales, None, mode="nearest", nearest_mode="floor",
            coordinate_transformation_mode="asymmetric",
        )  # fmt: skip
    for axis, size, factor in _changed(known, sizes, factors):
        x = op.Gather(x, _places(op, x, axis, size, factor, centre), axis=axis)
    return x


def _changed(
    known: Sequence[int | str | None], sizes: Sizes, factors: Factors
) -> Iterator[tuple[int, Size | None, float | None]]:
    """(axis, its size, its factor) where the size may change, of which one at least is known."""
    for i in range(len(known) - 2):
        size = None if sizes is None else sizes[i]
        factor = None if factors is None else float(factors[i])
        if factor != 1 and not (isinstance(size, int) and size == known[2 + i]):
            yield 2 + i, size, factor


def _is_whole(ratio: float) -> bool:
    """Whether no place comes out below the one that the quotient has, by PyTorch's product."""
    return ratio >= 1 and ratio == int(ratio) and float(np.float32(1 / ratio)) >= 1 / ratio


def _places(
    op: Translator, x: ir.Value, axis: int, size: Size | None, factor: float | None, centre: float
) -> ir.Value:
    """Of each element of the result along an axis, int64 [n], as kernels of PyTorch compute them.

    The step is multiplied in float32, in float64 for tensors of float64, and the product is rounded
    down in float32.
    """
    length, number, step = _step(op, x, axis, size, factor)
    dtype = _precision(x)
    row = op.cast(op.Range(np.int64(0), number, np.int64(1)), dtype)
    product = op.Mul(op.Add(row, op.constant(centre, dtype)) if centre else row, step)
    if dtype is ir.DataType.DOUBLE:  # to 24 bits: Dekker's splitting (1971)
        wide = op.Mul(product, float(2**29 + 1))
        product = op.Sub(wide, op.Sub(wide, product))
    places = op.cast(op.Floor(product), ir.DataType.INT64)
    return op.Min(places, op.Sub(length, 1))


def _precision(x: ir.Value) -> ir.DataType:
    """What places along an axis are computed in."""
    return ir.DataType.DOUBLE if x.dtype is ir.DataType.DOUBLE else ir.DataType.FLOAT


def _step(
    op: Translator, x: ir.Value, axis: int, size: Size | None, factor: float | None
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """How many elements an axis has and gets, int64 [], and the step between these, in the former.

    The step is the factor's reciprocal in float64, or the quotient of the sizes.
    """
    dtype = _precision(x)
    length = op.Squeeze(op.dim(x, axis), [0])
    if factor is not None:
        exact = op.Mul(op.cast(length, ir.DataType.DOUBLE), op.constant(np.float64(factor)))
        return length, op.cast(op.Floor(exact), ir.DataType.INT64), op.constant(1 / factor, dtype)
    assert size is not None
    number = size if isinstance(size, ir.Value) else op.constant(np.int64(size))
    return length, number, op.Div(op.cast(length, dtype), op.cast(number, dtype))


# -- lines and curves between places -------------------------------------------------------------

# Of the cubic convolution (Keys 1981), as PyTorch has it.
_A = -0.75


@translation(
    aten.upsample_linear1d.vec, aten.upsample_bilinear2d.vec, aten.upsample_trilinear3d.vec
)
def linear(
    op: Translator,
    input: ir.Value,
    output_size: Sizes,
    align_corners: bool,
    scale_factors: Factors,
) -> ir.Value:
    return _between(op, input, output_size, align_corners, scale_factors, "linear")


@translation(aten.upsample_bicubic2d.vec)
def cubic(
    op: Translator,
    input: ir.Value,
    output_size: Sizes,
    align_corners: bool,
    scale_factors: Factors,
) -> ir.Value:
    return _between(op, input, output_size, align_corners, scale_factors, "cubic")


def _between(
    op: Translator, x: ir.Value, sizes: Sizes, corners: bool, factors: Factors, mode: str
) -> ir.Value:
    """``Resize`` of images to sizes and by whole numbers, and else the places of each element.

    Of long signals the gradient of ``Resize`` is a matrix, and by a factor that is no whole number
    every kernel has sizes of its own.
    """
    known = shapes.dims(x)
    assert known is not None
    if x.dtype not in shapes.FLOATING:
        raise refuse("an image of whole numbers between two places")
    if mode == "cubic" and any(1 < factor < 2 for factor in factors or ()):
        raise refuse(
            "bicubic interpolation by a factor between 1 and 2",
            because="where the size stays the same, PyTorch's gradient is not that of its result",
        )
    if len(known) > 3 and all(float(factor).is_integer() for factor in factors or ()):
        whole = None if factors is None else op.constant(np.array([1, 1, *factors], np.float32))
        target = op.Concat(op.Shape(x, end=2), op.sizes(sizes), axis=0) if sizes else None
        way = "align_corners" if corners else "half_pixel"
        return op.Resize(
            x, None, whole, target, mode=mode, coordinate_transformation_mode=way,
            cubic_coeff_a=_A,
        )  # fmt: skip
    for axis, size, factor in _changed(known, sizes, factors):
        place, share = _position(op, x, axis, size, factor, corners, mode)
        last = op.Sub(op.Squeeze(op.dim(x, axis), [0]), 1)
        parts = []
        for offset, weight in _weights(op, share, mode):
            each = op.Min(op.Max(op.Add(place, offset), 0), last)
            weight = op.Reshape(op.cast(weight, x.dtype), [-1, *[1] * (len(known) - 1 - axis)])
            parts.append(op.Mul(op.Gather(x, each, axis=axis), weight))
        x = functools.reduce(op.Add, parts)
    return x


def _position(
    op: Translator,
    x: ir.Value,
    axis: int,
    size: Size | None,
    factor: float | None,
    corners: bool,
    mode: str,
) -> tuple[ir.Value, ir.Value]:
    """The place before each element of the result, int64 [n], and how far behind it that lies.

    A product and a difference are rounded once, as PyTorch's kernels do on processors with fused
    multiplication and addition. Lines begin at the first place, and are left alone where the axis
    stays as long as it was.
    """
    length, number, step = _step(op, x, axis, size, factor)
    dtype, wide = _precision(x), ir.DataType.DOUBLE
    row = op.cast(op.Range(np.int64(0), number, np.int64(1)), wide)
    if corners:
        ends, own = (op.cast(op.Sub(n, 1), dtype) for n in (length, number))
        step = op.Div(ends, op.Max(own, op.constant(1, dtype)))
        position = op.Mul(row, op.cast(step, wide))
    else:
        half = op.constant(0.5, wide)
        position = op.Sub(op.Mul(op.Add(row, half), op.cast(step, wide)), half)
    if mode == "linear":
        position = op.Max(position, op.constant(0, wide))
        position = op.Where(op.Equal(length, number), row, position)
    position = op.cast(position, dtype)
    place = op.Min(op.cast(op.Floor(position), ir.DataType.INT64), op.Sub(length, 1))
    zero, one = (op.constant(n, dtype) for n in (0, 1))
    return place, op.Clip(op.Sub(position, op.cast(place, dtype)), zero, one)


def _weights(op: Translator, share: ir.Value, mode: str) -> Iterator[tuple[int, ir.Value]]:
    """What the places around one count, by how far behind it an element lies."""
    rest = op.Sub(1.0, share)
    if mode == "linear":
        yield from ((0, rest), (1, share))
        return

    def near(t: ir.Value) -> ir.Value:
        return op.Add(op.Mul(op.Mul(op.Sub(op.Mul(t, _A + 2), _A + 3), t), t), 1.0)

    def far(t: ir.Value) -> ir.Value:
        t = op.Add(t, 1.0)
        return op.Sub(op.Mul(op.Add(op.Mul(op.Sub(op.Mul(t, _A), 5 * _A), t), 8 * _A), t), 4 * _A)

    yield from ((-1, far(share)), (0, near(share)), (1, near(rest)), (2, far(rest)))

"""Interpolation: which places of the input each element of the result takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ortrain.capture.onnx.translations.base import Size, Translator, aten, translation
from ortrain.graph import shapes


@translation(aten.upsample_nearest1d.vec, aten.upsample_nearest2d.vec, aten.upsample_nearest3d.vec)
def nearest(
    op: Translator,
    input: ir.Value,
    output_size: Sequence[Size] | None,
    scale_factors: Sequence[float] | None,
) -> ir.Value:
    return _nearest(op, input, output_size, scale_factors, 0.0)


@translation(
    aten._upsample_nearest_exact1d.vec,
    aten._upsample_nearest_exact2d.vec,
    aten._upsample_nearest_exact3d.vec,
)
def nearest_exact(
    op: Translator,
    input: ir.Value,
    output_size: Sequence[Size] | None,
    scale_factors: Sequence[float] | None,
) -> ir.Value:
    return _nearest(op, input, output_size, scale_factors, 0.5)


def _nearest(
    op: Translator,
    x: ir.Value,
    sizes: Sequence[Size] | None,
    factors: Sequence[float] | None,
    centre: float,
) -> ir.Value:
    """``Resize`` by whole numbers, which every kernel agrees on, and else by index."""
    known = shapes.dims(x)
    assert known is not None
    count = len(known) - 2
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
    for i in range(count):
        size = None if sizes is None else sizes[i]
        factor = None if factors is None else float(factors[i])
        if factor == 1 or (isinstance(size, int) and size == known[2 + i]):
            continue
        x = op.Gather(x, _places(op, x, 2 + i, size, factor, centre), axis=2 + i)
    return x


def _is_whole(ratio: float) -> bool:
    """Whether no place comes out below the one that the quotient has, by PyTorch's product."""
    return ratio >= 1 and ratio == int(ratio) and float(np.float32(1 / ratio)) >= 1 / ratio


def _places(
    op: Translator, x: ir.Value, axis: int, size: Size | None, factor: float | None, centre: float
) -> ir.Value:
    """Of each element of the result along an axis, int64 [n], as kernels of PyTorch compute them.

    The step is the factor's reciprocal in float64, or the quotient of the sizes. It is multiplied
    in float32, in float64 for tensors of float64, and the product is rounded down in float32.
    """
    dtype = ir.DataType.DOUBLE if x.dtype is ir.DataType.DOUBLE else ir.DataType.FLOAT
    length = op.Squeeze(op.dim(x, axis), [0])
    if factor is not None:
        exact = op.Mul(op.cast(length, ir.DataType.DOUBLE), op.constant(np.float64(factor)))
        number = op.cast(op.Floor(exact), ir.DataType.INT64)
        step = op.constant(1 / factor, dtype)
    else:
        assert size is not None
        number = size if isinstance(size, ir.Value) else op.constant(np.int64(size))
        step = op.Div(op.cast(length, dtype), op.cast(number, dtype))
    row = op.cast(op.Range(np.int64(0), number, np.int64(1)), dtype)
    product = op.Mul(op.Add(row, op.constant(centre, dtype)) if centre else row, step)
    if dtype is ir.DataType.DOUBLE:  # to 24 bits: Dekker's splitting (1971)
        wide = op.Mul(product, float(2**29 + 1))
        product = op.Sub(wide, op.Sub(wide, product))
    places = op.cast(op.Floor(product), ir.DataType.INT64)
    return op.Min(places, op.Sub(length, 1))

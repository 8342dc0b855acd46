"""Means: of nothing they are NaN in torch, and 0 in onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ortrain.capture.translations.base import Translator
from ortrain.graph import shapes

Axes = int | Sequence[int] | None


def axes_of(dim: Axes) -> list[list[int]]:
    """The axes input; torch takes an empty list for all of them."""
    if dim is None or dim == []:
        return []
    return [[dim] if isinstance(dim, int) else list(dim)]


def mean_of(op: Translator, value: ir.Value, dim: Axes = None, keepdim: bool = False) -> ir.Value:
    """The mean along some axes, of all by default."""
    known = shapes.dims(value)
    assert known is not None
    sizes = [known[axis] for axis in _reduced(value, dim)]
    if all(isinstance(size, int) and size > 0 for size in sizes):
        return op.ReduceMean(value, *axes_of(dim), keepdims=int(keepdim))
    total = op.ReduceSum(value, *axes_of(dim), keepdims=int(keepdim))
    return op.Div(total, count_of(op, value, dim))


def count_of(op: Translator, value: ir.Value, dim: Axes = None) -> ir.Value:
    """How many elements there are along some axes, as a scalar of the value's dtype."""
    assert value.dtype is not None
    count = op.constant(1, ir.DataType.INT64)
    for axis in _reduced(value, dim):
        count = op.Mul(count, op.Squeeze(op.dim(value, axis), [0]))
    return op.cast(count, value.dtype)


def _reduced(value: ir.Value, dim: Axes) -> Sequence[int]:
    length = shapes.rank(value)
    assert length is not None
    axes = axes_of(dim)
    return [axis % length for axis in axes[0]] if axes and length else range(length)

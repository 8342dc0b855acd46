"""Means: of nothing they are NaN in torch, and 0 in onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ortrain.capture.onnx.translations.base import Translator
from ortrain.graph import shapes

Axes = int | Sequence[int] | None


def axes_of(dim: Axes) -> list[list[int]]:
    """The axes input; torch takes an empty list for all of them."""
    if dim is None or dim == []:
        return []
    return [[dim] if isinstance(dim, int) else list(dim)]


def mean_of(op: Translator, value: ir.Value, dim: Axes = None, keepdim: bool = False) -> ir.Value:
    """The mean along some axes, of all by default."""
    known, axes = shapes.dims(value), axes_of(dim)
    sizes = [] if known is None else [known[axis] for axis in axes[0]] if axes else known
    if known is not None and all(isinstance(size, int) and size > 0 for size in sizes):
        return op.ReduceMean(value, *axes, keepdims=int(keepdim))
    return op.Div(op.ReduceSum(value, *axes, keepdims=int(keepdim)), count_of(op, value, dim))


def count_of(op: Translator, value: ir.Value, dim: Axes = None) -> ir.Value:
    """How many elements there are along some axes, as a scalar of the value's dtype."""
    assert value.dtype is not None
    sizes = op.shape(value)
    if axes := axes_of(dim):
        sizes = op.Gather(sizes, *axes)
    return op.cast(op.ReduceProd(sizes, keepdims=0), value.dtype)

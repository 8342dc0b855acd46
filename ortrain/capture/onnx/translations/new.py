"""What makes tensors: arange, full, zeros and their like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from ortrain.capture.onnx.translations.base import (
    Scalar,
    Size,
    Translator,
    aten,
    dtype_or,
    translation,
)


@translation(aten.arange.default)
def arange(op: Translator, end: Scalar, *, dtype: Any = None, **kw: Any) -> ir.Value:
    return arange_step(op, 0, end, 1, dtype=dtype)


@translation(aten.arange.start)
def arange_start(
    op: Translator, start: Scalar, end: Scalar, *, dtype: Any = None, **kw: Any
) -> ir.Value:
    return arange_step(op, start, end, 1, dtype=dtype)


@translation(aten.arange.start_step)
def arange_step(
    op: Translator,
    start: Scalar,
    end: Scalar,
    step: Scalar = 1,
    *,
    dtype: Any = None,
    **kw: Any,
) -> ir.Value:
    whole = not any(isinstance(v, float) for v in (start, end, step))
    counting = ir.DataType.INT64 if whole else ir.DataType.FLOAT
    wanted = dtype_or(dtype, counting)
    if not whole and wanted == ir.DataType.DOUBLE:
        counting = wanted
    bounds = [
        op.cast(v, counting) if isinstance(v, ir.Value) else op.constant(v, counting)
        for v in (start, end, step)
    ]
    return op.cast(op.Range(*bounds), wanted)


@translation(aten.eye.default)
def eye(op: Translator, n: Size, *, dtype: Any = None, **kw: Any) -> ir.Value:
    return eye_of(op, n, n, dtype=dtype)


@translation(aten.eye.m)
def eye_of(op: Translator, n: Size, m: Size, *, dtype: Any = None, **kw: Any) -> ir.Value:
    rows, columns = op.Unsqueeze(arange(op, n), [1]), arange(op, m)
    return op.cast(op.Equal(rows, columns), dtype_or(dtype, ir.DataType.FLOAT))


@translation(aten.full.default)
def full(
    op: Translator, size: Sequence[Size], fill_value: Scalar, *, dtype: Any = None, **kw: Any
) -> ir.Value:
    if isinstance(fill_value, ir.Value):
        assert fill_value.dtype is not None
        scalar = op.cast(fill_value, dtype_or(dtype, fill_value.dtype))
    else:
        scalar = op.constant(fill_value, dtype_or(dtype, _default_dtype(fill_value)))
    return op.Expand(scalar, op.sizes(size)) if len(size) else op.Identity(scalar)


def _default_dtype(value: float) -> ir.DataType:
    if isinstance(value, bool):
        return ir.DataType.BOOL
    return ir.DataType.INT64 if isinstance(value, int) else ir.DataType.FLOAT


@translation(aten.zeros.default, aten.empty.memory_format)
def zeros(op: Translator, size: Sequence[Size], *, dtype: Any = None, **kw: Any) -> ir.Value:
    return full(op, size, 0.0, dtype=dtype)


@translation(aten.ones.default)
def ones(op: Translator, size: Sequence[Size], *, dtype: Any = None, **kw: Any) -> ir.Value:
    return full(op, size, 1.0, dtype=dtype)


@translation(aten.new_zeros.default, aten.new_empty.default)
def new_zeros(
    op: Translator, self: ir.Value, size: Sequence[Size], *, dtype: Any = None, **kw: Any
) -> ir.Value:
    return new_full(op, self, size, 0, dtype=dtype)


@translation(aten.new_ones.default)
def new_ones(
    op: Translator, self: ir.Value, size: Sequence[Size], *, dtype: Any = None, **kw: Any
) -> ir.Value:
    return new_full(op, self, size, 1, dtype=dtype)


@translation(aten.new_full.default)
def new_full(
    op: Translator,
    self: ir.Value,
    size: Sequence[Size],
    fill_value: Scalar,
    *,
    dtype: Any = None,
    **kw: Any,
) -> ir.Value:
    assert self.dtype is not None
    return full(op, size, fill_value, dtype=dtype_or(dtype, self.dtype))


@translation(aten.full_like.default)
def full_like(
    op: Translator, self: ir.Value, fill_value: Scalar, *, dtype: Any = None, **kw: Any
) -> ir.Value:
    assert self.dtype is not None
    wanted = dtype_or(dtype, self.dtype)
    scalar = (
        op.cast(fill_value, wanted)
        if isinstance(fill_value, ir.Value)
        else op.constant(fill_value, wanted)
    )
    return op.Expand(scalar, op.shape(self))


@translation(aten.fill.Scalar, aten.fill.Tensor)
def fill(op: Translator, self: ir.Value, value: Scalar) -> ir.Value:
    """What was there receives a gradient of zeros, as in torch, and not None."""
    assert self.dtype is not None
    scalar = op.beside(value, self)
    scalar = scalar if isinstance(scalar, ir.Value) else op.constant(scalar, self.dtype)
    return _in_the_place_of(op, self, scalar)


@translation(aten.copy.default)
def copy(op: Translator, self: ir.Value, src: ir.Value, non_blocking: bool = False) -> ir.Value:
    """What was there receives a gradient of zeros, as in torch, and not None."""
    assert self.dtype is not None
    return _in_the_place_of(op, self, op.cast(src, self.dtype))


def _in_the_place_of(op: Translator, old: ir.Value, new: ir.Value) -> ir.Value:
    none = op.Expand(op.constant(False), op.shape(old))
    return op.Where(none, old, new)


@translation(aten.zeros_like.default, aten.empty_like.default)
def zeros_like(op: Translator, self: ir.Value, *, dtype: Any = None, **kw: Any) -> ir.Value:
    return full_like(op, self, 0, dtype=dtype)


@translation(aten.ones_like.default)
def ones_like(op: Translator, self: ir.Value, *, dtype: Any = None, **kw: Any) -> ir.Value:
    return full_like(op, self, 1, dtype=dtype)


@translation(aten.scalar_tensor.default)
def scalar_tensor(op: Translator, s: Scalar, *, dtype: Any = None, **kw: Any) -> ir.Value:
    return full(op, [], s, dtype=dtype_or(dtype, ir.DataType.FLOAT))

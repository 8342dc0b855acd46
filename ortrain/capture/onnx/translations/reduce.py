"""Reductions, running sums, triangles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from ortrain.capture.onnx.translations.base import Scalar, Translator, aten, refuse, translation
from ortrain.capture.onnx.translations.means import axes_of, count_of, mean_of
from ortrain.capture.onnx.translations.nn import in_dtype

_WHOLE = {ir.DataType.BOOL, ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32,
          ir.DataType.UINT8}  # fmt: skip


@translation(aten.sum.default)
def sum_all(op: Translator, self: ir.Value, *, dtype: Any = None) -> ir.Value:
    return op.ReduceSum(_summand(op, self, dtype), keepdims=0)


@translation(aten.sum.dim_IntList)
def sum(
    op: Translator,
    self: ir.Value,
    dim: int | Sequence[int] | None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> ir.Value:
    return op.ReduceSum(_summand(op, self, dtype), *axes_of(dim), keepdims=int(keepdim))


@translation(aten.prod.default)
def prod_all(op: Translator, self: ir.Value, *, dtype: Any = None) -> ir.Value:
    return op.ReduceProd(_summand(op, self, dtype), keepdims=0)


@translation(aten.prod.dim_int)
def prod(
    op: Translator, self: ir.Value, dim: int, keepdim: bool = False, *, dtype: Any = None
) -> ir.Value:
    return op.ReduceProd(_summand(op, self, dtype), *axes_of(dim), keepdims=int(keepdim))


def _summand(op: Translator, value: ir.Value, dtype: Any) -> ir.Value:
    """Torch sums and multiplies small integers in int64."""
    if dtype is None or dtype == -1:
        return op.cast(value, ir.DataType.INT64) if value.dtype in _WHOLE else value
    return in_dtype(op, value, dtype)


@translation(aten.mean.default)
def mean_all(op: Translator, self: ir.Value, *, dtype: Any = None) -> ir.Value:
    return mean_of(op, in_dtype(op, self, dtype))


@translation(aten.mean.dim)
def mean(
    op: Translator,
    self: ir.Value,
    dim: int | Sequence[int] | None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> ir.Value:
    return mean_of(op, in_dtype(op, self, dtype), dim, keepdim)


def _variance(
    op: Translator, value: ir.Value, dim: Any, correction: float, keepdim: bool
) -> ir.Value:
    centred = op.Sub(value, mean_of(op, value, dim, keepdim=True))
    square = op.Mul(centred, centred)
    if correction == 0:
        return mean_of(op, square, dim, keepdim)
    total = op.ReduceSum(square, *axes_of(dim), keepdims=int(keepdim))
    freedom = op.Sub(count_of(op, value, dim), float(correction))
    return op.Div(total, op.Max(freedom, op.constant(0.0, value.dtype)))


def _root(op: Translator, variance: ir.Value) -> ir.Value:
    """The square root, of whose gradient torch makes zero where the variance is zero."""
    flat, zero = op.Equal(variance, 0.0), op.constant(0.0, variance.dtype)
    return op.Where(flat, zero, op.Sqrt(op.Where(flat, op.constant(1.0, variance.dtype), variance)))


@translation(aten.var.correction)
def var(
    op: Translator,
    self: ir.Value,
    dim: int | Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> ir.Value:
    return _variance(op, self, dim, 1 if correction is None else correction, keepdim)


@translation(aten.std.correction)
def std(
    op: Translator,
    self: ir.Value,
    dim: int | Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> ir.Value:
    return _root(op, var(op, self, dim, correction=correction, keepdim=keepdim))


@translation(aten.var.dim)
def var_dim(
    op: Translator,
    self: ir.Value,
    dim: int | Sequence[int] | None,
    unbiased: bool = True,
    keepdim: bool = False,
) -> ir.Value:
    return _variance(op, self, dim, int(unbiased), keepdim)


@translation(aten.var.default)
def var_all(op: Translator, self: ir.Value, unbiased: bool = True) -> ir.Value:
    return _variance(op, self, None, int(unbiased), False)


@translation(aten.std.dim)
def std_dim(
    op: Translator,
    self: ir.Value,
    dim: int | Sequence[int] | None,
    unbiased: bool = True,
    keepdim: bool = False,
) -> ir.Value:
    return _root(op, _variance(op, self, dim, int(unbiased), keepdim))


@translation(aten.std.default)
def std_all(op: Translator, self: ir.Value, unbiased: bool = True) -> ir.Value:
    return _root(op, _variance(op, self, None, int(unbiased), False))


@translation(aten.var_mean.correction, aten.var_mean.dim, aten.var_mean.default)
def var_mean(op: Translator, self: ir.Value, *args: Any, **options: Any) -> Any:
    dim, correction, keepdim = _statistics(*args, **options)
    mean = mean_of(op, self, dim, keepdim)
    return _variance(op, self, dim, correction, keepdim), mean


@translation(aten.std_mean.correction, aten.std_mean.dim, aten.std_mean.default)
def std_mean(op: Translator, self: ir.Value, *args: Any, **options: Any) -> Any:
    variance, mean = var_mean(op, self, *args, **options)
    return op.Sqrt(variance), mean


def _statistics(
    *args: Any,
    dim: int | Sequence[int] | None = None,
    unbiased: bool = True,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Any, float, bool]:
    """Axes, correction and whether they stay, of any overload."""
    if len(args) == 1 and isinstance(args[0], bool):  # the overload without axes
        return None, int(args[0]), False
    given: tuple[Any, ...] = (*args, *(dim, unbiased, keepdim)[len(args) :])
    axes, one_less, kept = given
    return axes, int(one_less) if correction is None else correction, kept


def _truth(*targets: Any, of_one: bool) -> None:
    """Of one it is not the least of their opposites: the largest of nothing would be true."""

    @translation(*targets)
    def translate(
        op: Translator,
        self: ir.Value,
        dim: int | Sequence[int] | None = None,
        keepdim: bool = False,
    ) -> ir.Value:
        truth = op.cast(self, ir.DataType.BOOL)
        least = op.ReduceMin(
            op.cast(op.Not(truth) if of_one else truth, ir.DataType.INT32),
            *axes_of(dim),
            keepdims=int(keepdim),
        )
        result = op.cast(least, ir.DataType.BOOL)
        result = op.Not(result) if of_one else result
        # The truth of small integers is such an integer in torch.
        return op.cast(result, ir.DataType.UINT8) if self.dtype == ir.DataType.UINT8 else result


_truth(aten.any.default, aten.any.dim, aten.any.dims, of_one=True)
_truth(aten.all.default, aten.all.dim, aten.all.dims, of_one=False)


@translation(aten.amax.default, aten.max.default)
def amax(
    op: Translator, self: ir.Value, dim: int | Sequence[int] = (), keepdim: bool = False
) -> ir.Value:
    return op.ReduceMax(self, *axes_of(dim or None), keepdims=int(keepdim))


@translation(aten.amin.default, aten.min.default)
def amin(
    op: Translator, self: ir.Value, dim: int | Sequence[int] = (), keepdim: bool = False
) -> ir.Value:
    return op.ReduceMin(self, *axes_of(dim or None), keepdims=int(keepdim))


@translation(aten.argmax.default)
def argmax(
    op: Translator, self: ir.Value, dim: int | None = None, keepdim: bool = False
) -> ir.Value:
    if dim is None:
        return op.ArgMax(op.Reshape(self, [-1]), axis=0, keepdims=0)
    return op.ArgMax(self, axis=dim, keepdims=int(keepdim))


@translation(aten.cumsum.default)
def cumsum(op: Translator, self: ir.Value, dim: int, *, dtype: Any = None) -> ir.Value:
    return op.CumSum(_summand(op, self, dtype), op.constant(dim, ir.DataType.INT64))


@translation(aten.tril.default)
def tril(op: Translator, self: ir.Value, diagonal: int = 0) -> ir.Value:
    return _triangle(op, self, diagonal, upper=0)


@translation(aten.triu.default)
def triu(op: Translator, self: ir.Value, diagonal: int = 0) -> ir.Value:
    return _triangle(op, self, diagonal, upper=1)


def _triangle(op: Translator, value: ir.Value, diagonal: Any, upper: int) -> ir.Value:
    offset = (
        diagonal if isinstance(diagonal, ir.Value) else op.constant(diagonal, ir.DataType.INT64)
    )
    if value.dtype == ir.DataType.BOOL:  # no kernel for bool on every provider
        return op.cast(
            op.Trilu(op.cast(value, ir.DataType.INT64), offset, upper=upper), ir.DataType.BOOL
        )
    return op.Trilu(value, offset, upper=upper)


@translation(aten._is_all_true.default)
def is_all_true(op: Translator, self: ir.Value) -> ir.Value:
    return op.Equal(_count(op, op.Not(self)), 0)


@translation(aten._is_any_true.default)
def is_any_true(op: Translator, self: ir.Value) -> ir.Value:
    return op.Greater(_count(op, self), 0)


def _count(op: Translator, flags: ir.Value) -> ir.Value:
    """How many are true."""
    return op.ReduceSum(op.cast(flags, ir.DataType.INT64), keepdims=0)


@translation(aten.linalg_vector_norm.default)
def vector_norm(
    op: Translator,
    self: ir.Value,
    ord: Scalar = 2,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> ir.Value:
    value = in_dtype(op, self, dtype)
    axes, keepdims = axes_of(dim), int(keepdim)
    if ord == 2:
        return op.ReduceL2(value, *axes, keepdims=keepdims)
    if ord == 1:
        return op.ReduceL1(value, *axes, keepdims=keepdims)
    if ord == 0:  # a count: no gradient flows
        assert value.dtype is not None
        apart = op.cast(op.Not(op.Equal(value, 0.0)), value.dtype)
        return op.ReduceSum(apart, *axes, keepdims=keepdims)
    if ord == float("inf"):
        return op.ReduceMax(op.Abs(value), *axes, keepdims=keepdims)
    if ord == float("-inf"):
        return op.ReduceMin(op.Abs(value), *axes, keepdims=keepdims)
    if isinstance(ord, ir.Value) or ord < 1:
        raise refuse(f"the norm of order {ord}", because="its slope at zero is without bound")
    powers = op.ReduceSum(op.Pow(op.Abs(value), float(ord)), *axes, keepdims=keepdims)
    zero = op.Equal(powers, 0.0)  # where the root has no slope, and torch takes 0 for it
    root = op.Pow(op.Where(zero, 1.0, powers), 1.0 / ord)
    return op.Where(zero, 0.0, root)

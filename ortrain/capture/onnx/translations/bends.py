"""Functions with a kink, a pole or a branch cut: value and gradient there are PyTorch's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from ortrain.capture.onnx.translations.base import Scalar, Translator, aten, refuse, translation
from ortrain.graph import shapes
from ortrain.graph.shapes import fits_float32
from ortrain.ops.hardtanh import is_outside


def _dtype(value: ir.Value) -> ir.DataType:
    assert value.dtype is not None
    return value.dtype


def _is_float(value: ir.Value) -> bool:
    return _dtype(value).is_floating_point()


def _zero(op: Translator, like: ir.Value) -> ir.Value:
    return op.constant(0, like.dtype)


@translation(aten.hardtanh.default)
def hardtanh(
    op: Translator, self: ir.Value, min_val: Scalar = -1.0, max_val: Scalar = 1.0
) -> ir.Value:
    """No gradient at the bounds, unlike that of clamp."""
    if not _is_float(self):
        return op.Clip(self, min_val, max_val)
    if not isinstance(min_val, ir.Value) and not isinstance(max_val, ir.Value):
        low, high = float(min_val), float(max_val)
        if fits_float32(low) and fits_float32(high) and low < high:
            return op.ours("Hardtanh", self, min_val=low, max_val=high)
    outside = is_outside(op, self, min_val, max_val)
    return op.Where(outside, op.ours("StopGradient", op.Clip(self, min_val, max_val)), self)


@translation(aten.relu6.default)
def relu6(op: Translator, self: ir.Value) -> ir.Value:
    return hardtanh(op, self, 0.0, 6.0)


@translation(aten.clamp.default)
def clamp(
    op: Translator, self: ir.Value, min: Scalar | None = None, max: Scalar | None = None
) -> ir.Value:
    if isinstance(min, ir.Value) or isinstance(max, ir.Value):
        return clamp_between(op, self, _bound(op, min, self), _bound(op, max, self))
    if _is_float(self):  # an absent bound of Clip is the largest finite number
        min, max = (-math.inf if min is None else min), (math.inf if max is None else max)
    return op.Clip(self, min, max)


def _bound(op: Translator, bound: Scalar | None, like: ir.Value) -> ir.Value | None:
    if bound is None or isinstance(bound, ir.Value):
        return None if bound is None else op.cast(bound, _dtype(like))
    return op.constant(bound, like.dtype)


@translation(aten.clamp_min.default)
def clamp_min(op: Translator, self: ir.Value, min: Scalar) -> ir.Value:
    return clamp(op, self, min)


@translation(aten.clamp_max.default)
def clamp_max(op: Translator, self: ir.Value, max: Scalar) -> ir.Value:
    return clamp(op, self, None, max)


@translation(aten.clamp.Tensor)
def clamp_between(
    op: Translator, self: ir.Value, min: ir.Value | None = None, max: ir.Value | None = None
) -> ir.Value:
    """At a bound the gradient is that of the tensor, not of the bound."""
    result = self
    if min is not None:
        result = op.Where(_beyond(op, op.Less(self, min), min), min, result)
    if max is not None:
        above = op.Greater(self, max)
        if min is not None:
            crossed = op.Less(max, min)
            if _is_float(self):  # what is no number stays so
                crossed = op.And(crossed, op.Not(op.IsNaN(self)))
            above = op.Or(above, crossed)
        result = op.Where(_beyond(op, above, max), max, result)
    return result


def _beyond(op: Translator, beyond: ir.Value, bound: ir.Value) -> ir.Value:
    return op.Or(beyond, op.IsNaN(bound)) if _is_float(bound) else beyond


@translation(aten.clamp_min.Tensor)
def clamp_above(op: Translator, self: ir.Value, min: ir.Value) -> ir.Value:
    return clamp_between(op, self, min)


@translation(aten.clamp_max.Tensor)
def clamp_below(op: Translator, self: ir.Value, max: ir.Value) -> ir.Value:
    return clamp_between(op, self, None, max)


@translation(aten.logit.default)
def logit(op: Translator, self: ir.Value, eps: Scalar | None = None) -> ir.Value:
    """``ln(x / (1 - x))``, of x within eps of 0 and 1 at the nearest."""
    if eps is not None:
        self = clamp(op, self, eps, 1 - eps)
    return op.Log(op.Div(self, op.Sub(op.constant(1, self.dtype), self)))


@translation(aten.logaddexp.default)
def logaddexp(op: Translator, self: ir.Value, other: ir.Value) -> ir.Value:
    """The larger one, and what the other adds."""
    # Of two infinities of one sign there is no difference.
    same = op.And(op.Equal(self, other), op.IsInf(self))
    apart = op.Where(same, _zero(op, self), op.Sub(other, self))
    first = op.Add(self, op.Softplus(apart))
    second = op.Add(other, op.Softplus(op.Neg(apart)))
    return op.Where(same, self, op.Where(op.Greater(other, self), second, first))


@translation(aten.logaddexp2.default)
def logaddexp2(op: Translator, self: ir.Value, other: ir.Value) -> ir.Value:
    ln2 = math.log(2)
    return op.Div(logaddexp(op, op.Mul(self, ln2), op.Mul(other, ln2)), ln2)


@translation(aten.sinc.default)
def sinc(op: Translator, self: ir.Value) -> ir.Value:
    angle = op.Mul(self, math.pi)
    flat, one = op.Equal(angle, 0.0), op.constant(1, self.dtype)
    safe = op.Where(flat, one, angle)
    return op.Where(flat, one, op.Div(op.Sin(safe), safe))


@translation(aten.atan2.default)
def atan2(op: Translator, self: ir.Value, other: ir.Value) -> ir.Value:
    """The angle of a point: an arctangent of the smaller coordinate over the larger one."""
    y, x = self, other
    endless = op.And(op.IsInf(y), op.IsInf(x))  # as the diagonal of the quadrant
    origin = op.And(op.Equal(y, 0.0), op.Equal(x, 0.0))
    y = op.Where(endless, op.ours("StopGradient", op.Sign(y)), y)
    x = op.Where(endless, op.ours("StopGradient", op.Sign(x)), x)
    steep = op.Greater(op.Abs(y), op.Abs(x))
    over = op.Where(origin, op.constant(1, self.dtype), op.Where(steep, y, x))
    slope = op.Div(op.Where(origin, _zero(op, self), op.Where(steep, x, y)), over)
    angle = op.Where(steep, op.Neg(op.Atan(slope)), op.Atan(slope))
    down, left = _negative(op, y), _negative(op, x)
    quarter = op.Where(down, *(op.constant(sign * math.pi / 2, self.dtype) for sign in (-1, 1)))
    half = op.Where(left, op.Mul(quarter, 2.0), _zero(op, self))
    return op.Add(angle, op.Where(steep, quarter, half))


def _negative(op: Translator, value: ir.Value) -> ir.Value:
    """Whether the sign is minus, that of a zero included."""
    below = op.Less(op.Reciprocal(op.ours("StopGradient", value)), 0.0)
    return op.Or(op.Less(value, 0.0), op.And(op.Equal(value, 0.0), below))


@translation(aten.signbit.default)
def signbit(op: Translator, self: ir.Value) -> ir.Value:
    if not _is_float(self):
        return op.Less(self, op.constant(0, self.dtype))
    return _negative(op, self)


@translation(aten.max.dim)
def max_along(
    op: Translator, self: ir.Value, dim: int, keepdim: bool = False
) -> tuple[ir.Value, ir.Value]:
    """Of equal ones the first is chosen, and has all of the gradient."""
    return _chosen(op, "ArgMax", self, dim, keepdim)


@translation(aten.min.dim)
def min_along(
    op: Translator, self: ir.Value, dim: int, keepdim: bool = False
) -> tuple[ir.Value, ir.Value]:
    return _chosen(op, "ArgMin", self, dim, keepdim)


def _chosen(
    op: Translator, op_type: str, value: ir.Value, dim: int, keepdim: bool
) -> tuple[ir.Value, ir.Value]:
    if shapes.rank(value) == 0:
        return op.Identity(value), op.constant(np.int64(0))
    if value.dtype == ir.DataType.BOOL:
        index = op.node(op_type, (op.cast(value, ir.DataType.INT32),), axis=dim, keepdims=1)
    else:
        index = op.node(op_type, (value,), axis=dim, keepdims=1)
    found = op.GatherElements(value, index, axis=dim)
    return (found, index) if keepdim else (op.Squeeze(found, [dim]), op.Squeeze(index, [dim]))


@translation(aten.cdist.default)
def cdist(op: Translator, *args: Any, **kwargs: Any) -> ir.Value:
    raise refuse(
        "cdist",
        "its gradient at a distance of zero is none of its formula",
        "write torch.linalg.vector_norm(a.unsqueeze(-2) - b.unsqueeze(-3), dim=-1)",
    )

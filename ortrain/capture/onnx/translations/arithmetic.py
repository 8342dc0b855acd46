"""Element by element: arithmetic, comparison, logic, selection, casts, symbolic integers."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ortrain.capture.onnx.translations.base import (
    Function,
    Scalar,
    Translator,
    aten,
    dtype_or,
    refuse,
    symbolic,
    translation,
)
from ortrain.graph import shapes


def _binary(op_type: str, *targets: Any) -> Function:
    @translation(*targets)
    def translate(op: Translator, self: ir.Value, other: Scalar) -> ir.Value:
        return op.node(op_type, (self, op.beside(other, self)))

    return translate


def _unary(op_type: str, *targets: Any) -> Function:
    @translation(*targets)
    def translate(op: Translator, self: ir.Value) -> ir.Value:
        return op.node(op_type, (self,))

    return translate


_binary("Div", aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor)
_binary("Equal", aten.eq.Tensor, aten.eq.Scalar)
_binary("Greater", aten.gt.Tensor, aten.gt.Scalar)
_binary("GreaterOrEqual", aten.ge.Tensor, aten.ge.Scalar)
_binary("Less", aten.lt.Tensor, aten.lt.Scalar)
_binary("LessOrEqual", aten.le.Tensor, aten.le.Scalar)
_binary("Min", aten.minimum.default, aten.min.other)
_binary("Max", aten.maximum.default, aten.max.other)
_binary("And", aten.logical_and.default)
_binary("Or", aten.logical_or.default)
_binary("Xor", aten.logical_xor.default)
_unary("Abs", aten.abs.default)
_unary("Ceil", aten.ceil.default)
_unary("Cos", aten.cos.default)
_unary("Erf", aten.erf.default)
_unary("Exp", aten.exp.default)
_unary("Floor", aten.floor.default)
_unary("Identity", aten.contiguous.default, aten.alias.default, aten.lift_fresh_copy.default)
_unary("IsNaN", aten.isnan.default)
_unary("Log", aten.log.default)
_unary("Neg", aten.neg.default)
_unary("Not", aten.logical_not.default)
_unary("Reciprocal", aten.reciprocal.default)
_unary("Sin", aten.sin.default)
_unary("Sqrt", aten.sqrt.default)
_unary("Tanh", aten.tanh.default)


@translation(aten.sigmoid.default)
def sigmoid(op: Translator, self: ir.Value) -> ir.Value:
    return op.ours("Sigmoid", self)


@translation(aten.log1p.default)
def log1p(op: Translator, self: ir.Value) -> ir.Value:
    return op.ours("Log1p", self)


@translation(aten.expm1.default)
def expm1(op: Translator, self: ir.Value) -> ir.Value:
    return op.ours("Expm1", self)


@translation(aten.erfc.default)
def erfc(op: Translator, self: ir.Value) -> ir.Value:
    raise refuse("erfc", "1 - erf(x) has no digits left where x is large")


@translation(aten.log2.default)
def log2(op: Translator, self: ir.Value) -> ir.Value:
    return _log_of_base(op, self, 2.0)


@translation(aten.log10.default)
def log10(op: Translator, self: ir.Value) -> ir.Value:
    return _log_of_base(op, self, 10.0)


def _log_of_base(op: Translator, x: ir.Value, base: float) -> ir.Value:
    """``ln x / ln base``, and a whole number where x is such a power: it may be rounded down."""
    result = op.Div(op.Log(x), math.log(base))
    whole = op.Round(result)
    is_power = op.Equal(op.Pow(op.constant(base, x.dtype), whole), x)
    is_power = op.And(is_power, op.Not(op.IsInf(whole)))
    correction = op.Where(is_power, op.Sub(whole, result), op.constant(0, x.dtype))
    return op.Add(result, op.ours("StopGradient", correction))


@translation(aten.exp2.default)
def exp2(op: Translator, self: ir.Value) -> ir.Value:
    return op.Pow(op.constant(2, self.dtype), self)


@translation(aten.sign.default)
def sign(op: Translator, self: ir.Value) -> ir.Value:
    """A NaN has sign 0 in torch."""
    if self.dtype not in shapes.FLOATING:
        return op.Sign(self)
    return op.Where(op.Equal(self, self), op.Sign(self), op.constant(0.0, self.dtype))


@translation(aten.add.Tensor, aten.add.Scalar)
def add(op: Translator, self: ir.Value, other: Scalar, alpha: Scalar = 1) -> ir.Value:
    if self.dtype == ir.DataType.BOOL:  # a sum of truths
        return op.Or(self, _times(op, op.beside(other, self), alpha))
    return op.Add(self, _times(op, op.beside(other, self), alpha))


@translation(aten.mul.Tensor, aten.mul.Scalar)
def mul(op: Translator, self: ir.Value, other: Scalar) -> ir.Value:
    op_type = "And" if self.dtype == ir.DataType.BOOL else "Mul"
    return op.node(op_type, (self, op.beside(other, self)))


@translation(aten.sub.Tensor, aten.sub.Scalar)
def sub(op: Translator, self: ir.Value, other: Scalar, alpha: Scalar = 1) -> ir.Value:
    return op.Sub(self, _times(op, op.beside(other, self), alpha))


@translation(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(op: Translator, self: ir.Value, other: Scalar, alpha: Scalar = 1) -> ir.Value:
    return op.Sub(op.beside(other, self), _times(op, self, alpha))


def _times(op: Translator, value: Scalar, alpha: Scalar) -> Scalar:
    if not isinstance(alpha, ir.Value) and alpha == 1:
        return value
    if isinstance(value, ir.Value):
        return mul(op, value, alpha)
    return value * alpha


@translation(aten.ne.Tensor, aten.ne.Scalar)
def ne(op: Translator, self: ir.Value, other: Scalar) -> ir.Value:
    return op.Not(op.Equal(self, op.beside(other, self)))


@translation(aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor)
def pow(op: Translator, self: ir.Value, exponent: Scalar) -> ir.Value:
    if not isinstance(exponent, ir.Value) and exponent == 0.5:
        return op.Sqrt(self)  # as torch does: another number at minus infinity
    if self.dtype not in shapes.FLOATING and isinstance(exponent, int) and exponent > 0:
        return _product(op, self, exponent)
    return op.Pow(self, op.beside(exponent, self))


def _product(op: Translator, x: ir.Value, count: int) -> ir.Value:
    """A whole number by itself: onnxruntime's ``Pow`` goes by way of float64."""
    result, square = None, x
    while True:
        if count % 2:
            result = square if result is None else op.Mul(result, square)
        count //= 2
        if not count:
            break
        square = op.Mul(square, square)
    assert result is not None
    return result


@translation(aten.rsqrt.default)
def rsqrt(op: Translator, self: ir.Value) -> ir.Value:
    return op.Reciprocal(op.Sqrt(self))


def _logical_or_bitwise(logical: str, bitwise: str, *targets: Any) -> None:
    @translation(*targets)
    def translate(op: Translator, self: ir.Value, *other: ir.Value) -> ir.Value:
        return op.node(logical if self.dtype == ir.DataType.BOOL else bitwise, (self, *other))


for _name, _packets in {
    "And": (aten.__and__, aten.bitwise_and),
    "Or": (aten.__or__, aten.bitwise_or),
    "Xor": (aten.__xor__, aten.bitwise_xor),
}.items():
    _targets = [target for each in _packets for target in (each.Tensor, each.Scalar)]
    _logical_or_bitwise(_name, f"Bitwise{_name}", *_targets)
_logical_or_bitwise("Not", "BitwiseNot", aten.bitwise_not.default)


@translation(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf)
def where(op: Translator, condition: ir.Value, self: Scalar, other: Scalar) -> ir.Value:
    return op.Where(condition, self, other)


@translation(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(op: Translator, self: ir.Value, mask: ir.Value, value: Scalar) -> ir.Value:
    return op.Where(mask, op.beside(value, self), self)


@translation(aten.detach.default)
def detach(op: Translator, self: ir.Value) -> ir.Value:
    return op.ours("StopGradient", self)


@translation(aten.item.default, aten._local_scalar_dense.default)
def item(op: Translator, self: ir.Value) -> ir.Value:
    """A number as far as Python is concerned: no gradient flows through it."""
    return op.ours("StopGradient", op.Reshape(self, op.constant(np.array([], np.int64))))


# -- casts ---------------------------------------------------------------------------------------


@translation(aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.clone.default)
def to_dtype(op: Translator, self: ir.Value, dtype: Any = None, *rest: Any, **kw: Any) -> ir.Value:
    assert self.dtype is not None
    return op.cast(self, dtype_or(dtype, self.dtype))


@translation(aten.to.device)
def to_device(
    op: Translator, self: ir.Value, device: Any, dtype: Any = None, *rest: Any, **kw: Any
) -> ir.Value:
    return to_dtype(op, self, dtype)


@translation(aten.to.other, aten.type_as.default)
def to_other(op: Translator, self: ir.Value, other: ir.Value, *rest: Any, **kw: Any) -> ir.Value:
    assert other.dtype is not None
    return op.cast(self, other.dtype)


# -- symbolic integers ---------------------------------------------------------------------------


@translation(aten.sym_size.int)
def sym_size(op: Translator, self: ir.Value, dim: int) -> ir.Value:
    return op.Squeeze(op.dim(self, dim), [0])


@translation(aten.sym_numel.default)
def sym_numel(op: Translator, self: ir.Value) -> ir.Value:
    return op.Size(self)


def _integers(op: Translator, operator: str, *numbers: Scalar) -> list[ir.Value]:
    if any(map(_is_float, numbers)):
        raise symbolic(f"{operator} of a size and a float")
    return [n if isinstance(n, ir.Value) else op.constant(np.int64(n)) for n in numbers]


def _is_float(number: Scalar) -> bool:
    if isinstance(number, ir.Value):
        return number.dtype is ir.DataType.DOUBLE
    return isinstance(number, float)


def _wide(op: Translator, *numbers: Scalar) -> list[ir.Value]:
    """Sizes and numbers in float64, as Python's floats are."""
    return [
        op.cast(n, ir.DataType.DOUBLE) if isinstance(n, ir.Value) else op.constant(np.float64(n))
        for n in numbers
    ]


def _sizes(op_type: str, *targets: Any) -> None:
    @translation(*targets)
    def translate(op: Translator, a: Scalar, b: Scalar) -> ir.Value:
        return op.node(op_type, _integers(op, op_type, a, b))


def _numbers(op_type: str, target: Any) -> None:
    @translation(target)
    def translate(op: Translator, a: Scalar, b: Scalar) -> ir.Value:
        is_wide = _is_float(a) or _is_float(b)
        return op.node(op_type, _wide(op, a, b) if is_wide else _integers(op, op_type, a, b))


_numbers("Add", operator.add)
_numbers("Sub", operator.sub)
_numbers("Mul", operator.mul)
_sizes("Mod", operator.mod)
_sizes("Min", torch.sym_min)
_sizes("Max", torch.sym_max)


@translation(operator.floordiv)
def floordiv(op: Translator, a: Scalar, b: Scalar) -> ir.Value:
    """Rounded down as in Python; ONNX rounds towards zero, which ``-(-n // 2)`` would show."""
    over, under = _integers(op, "Div", a, b)
    if not (_is_count(over) and _is_count(under)):
        over = op.Sub(over, op.Mod(over, under))  # Mod has the sign of the divisor
    return op.Div(over, under)


def _is_count(value: ir.Value) -> bool:
    """Whether an integer is known not to be negative."""
    known = shapes.constant(value)
    if known is not None:
        return bool((known >= 0).all())
    node = value.producer()
    if node is None or node.domain:
        return False
    if node.op_type in ("Shape", "Size"):
        return True
    if node.op_type in ("Squeeze", "Unsqueeze", "Gather", "Slice", "Identity"):
        return node.inputs[0] is not None and _is_count(node.inputs[0])
    within = ("Add", "Mul", "Div", "Mod", "Min", "Max", "Concat")
    return node.op_type in within and all(v is not None and _is_count(v) for v in node.inputs)


@translation(operator.truediv)
def truediv(op: Translator, a: Scalar, b: Scalar) -> ir.Value:
    """A quotient of sizes, as Python rounds it."""
    return op.Div(*_wide(op, a, b))


@translation(torch.sym_float)
def sym_float(op: Translator, a: Scalar) -> ir.Value:
    return _wide(op, a)[0]


def _whole(op_type: str, target: Any) -> None:
    @translation(target)
    def translate(op: Translator, a: ir.Value) -> ir.Value:
        if a.dtype is ir.DataType.INT64:
            return a
        return op.cast(op.node(op_type, (a,)) if op_type else a, ir.DataType.INT64)


_whole("Ceil", math.ceil)
_whole("Floor", math.floor)
_whole("", math.trunc)  # as a cast does


# Of what reads a float that is made of sizes, that of which the translation takes one as it is.
READING_FLOATS = frozenset(
    {
        aten.add.Tensor,
        aten.div.Tensor,
        aten.full.default,
        aten.mul.Tensor,
        aten.scalar_tensor.default,
        aten.sub.Tensor,
        math.ceil,
        math.floor,
        math.trunc,
        operator.add,
        operator.mul,
        operator.neg,
        operator.sub,
        operator.truediv,
    }
)


@translation(torch.sym_sum)
def size_sum(op: Translator, sizes: Sequence[Scalar]) -> Scalar:
    """Such as the length of a concatenation."""
    first, *others = sizes
    for other in others:
        first = op.node("Add", _integers(op, "Add", first, other))
    return first


@translation(torch.sym_ite)
def size_by_condition(op: Translator, condition: ir.Value, a: Scalar, b: Scalar) -> ir.Value:
    """Such as the number that a truth value is."""
    return op.Where(condition, *_integers(op, "Where", a, b))


@translation(operator.neg)
def size_neg(op: Translator, a: ir.Value) -> ir.Value:
    return op.Neg(a)


@translation(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_rounded(
    op: Translator, self: ir.Value, other: Scalar, *, rounding_mode: str | None
) -> ir.Value:
    divisor = _operand(op, other, self)
    if rounding_mode == "floor":
        return floor_divide(op, self, divisor)
    if rounding_mode is None and self.dtype not in shapes.FLOATING:
        raise refuse("div of whole numbers with rounding_mode=None", help="write a / b")
    quotient = op.Div(self, divisor)  # of integers it is cut
    if rounding_mode is None or self.dtype not in shapes.FLOATING:
        return quotient
    return op.Where(op.Less(quotient, 0.0), op.Ceil(quotient), op.Floor(quotient))


@translation(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(op: Translator, self: ir.Value, other: Scalar) -> ir.Value:
    """From the exact remainder, as Python does it: 1 // 0.1 is 9, though 1 / 0.1 rounds to 10."""
    divisor, zero = _operand(op, other, self), op.constant(0, self.dtype)
    if self.dtype not in shapes.FLOATING:
        cut = op.Div(self, divisor)
        rest = op.Sub(self, op.Mul(cut, divisor))
        below = _on_other_sides(op, rest, divisor)
        return op.Sub(cut, op.Where(below, op.constant(1, self.dtype), zero))
    quotient = op.Div(op.Sub(self, remainder(op, self, divisor)), divisor)
    floor = op.Floor(quotient)
    above = op.Greater(op.Sub(quotient, floor), op.constant(0.5, self.dtype))
    whole = op.Add(floor, op.Where(above, op.constant(1, self.dtype), zero))
    return op.Where(op.Equal(divisor, zero), op.Div(self, divisor), whole)


@translation(aten.xlogy.Tensor, aten.xlogy.Scalar_Other)
def xlogy(op: Translator, self: ir.Value, other: Scalar) -> ir.Value:
    return op.ours("Xlogy", self, _operand(op, other, self))


@translation(aten.remainder.Tensor, aten.remainder.Scalar)
def remainder(op: Translator, self: ir.Value, other: Scalar) -> ir.Value:
    """With the sign of the divisor, from C's ``fmod``, which is exact."""
    divisor = _operand(op, other, self)
    if self.dtype not in shapes.FLOATING:
        return op.Mod(self, divisor)
    rest = op.Mod(self, divisor, fmod=1)
    return op.Where(_on_other_sides(op, rest, divisor), op.Add(rest, divisor), rest)


def _on_other_sides(op: Translator, a: ir.Value, b: ir.Value) -> ir.Value:
    """Whether zero lies between two values."""
    return op.Less(op.Mul(op.Sign(a), op.Sign(b)), op.constant(0, a.dtype))


@translation(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(op: Translator, self: ir.Value, other: Scalar) -> ir.Value:
    divisor = _operand(op, other, self)
    if self.dtype not in shapes.FLOATING:  # of which the kernel computes in float64
        return op.Sub(self, op.Mul(op.Div(self, divisor), divisor))
    return op.Mod(self, divisor, fmod=1)


def _operand(op: Translator, other: Scalar, value: ir.Value) -> ir.Value:
    """A scalar or tensor as a tensor of the dtype of the value that it meets."""
    met = op.beside(other, value)
    return met if isinstance(met, ir.Value) else op.constant(met, value.dtype)

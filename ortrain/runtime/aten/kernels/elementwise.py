"""Arithmetic, comparisons, logic and choice, element by element."""

from __future__ import annotations

import math
from functools import reduce

import onnx_ir as ir

from ortrain.graph.shapes import FLOATING
from ortrain.runtime.aten.dtypes import UNSIGNED
from ortrain.runtime.aten.kernels.cast import converted
from ortrain.runtime.aten.kernels.unsigned import (
    divided,
    ordered,
    shifted_right,
    turned,
)
from ortrain.runtime.aten.operands import Host, Tensor
from ortrain.runtime.aten.table import kernel


def _unary(operator, function):
    @kernel(operator)
    def unary(t, x):
        return t.call(f"torch.{function}", t.tensor(x))


for _operator, _function in {
    "Acos": "acos", "Acosh": "acosh", "Asin": "asin", "Asinh": "asinh", "Atan": "atan",
    "Atanh": "atanh", "BitwiseNot": "bitwise_not", "Ceil": "ceil", "Cos": "cos", "Cosh": "cosh",
    "Erf": "erf", "Exp": "exp", "Floor": "floor", "IsNaN": "isnan", "Log": "log", "Neg": "neg",
    "Not": "logical_not", "Reciprocal": "reciprocal", "Round": "round", "Sin": "sin",
    "Sinh": "sinh", "Sqrt": "sqrt", "Tan": "tan", "ortrain::Expm1": "expm1",
    "ortrain::Log1p": "log1p",
}.items():  # fmt: skip
    _unary(_operator, _function)


@kernel("Identity", "ortrain::StopGradient")
def identity(t, x):
    return x


@kernel("Abs")
def absolute(t, x):
    return x if x.dtype in UNSIGNED else t.abs(t.tensor(x))


@kernel("Sign")
def sign(t, x):
    return t.ne(x, 0).to(x.dtype) if x.dtype in UNSIGNED else t.sign(t.tensor(x))


@kernel("IsInf")
def is_infinite(t, x, *, detect_negative=1, detect_positive=1):
    if detect_negative and detect_positive:
        return t.isinf(x)
    if detect_positive:
        return t.isposinf(x)
    return t.isneginf(x) if detect_negative else t.zeros_like(x, dtype=ir.DataType.BOOL)


# -- arithmetic ------------------------------------------------------------------------------------


@kernel("Add")
def add(t, a, b):
    return t.add(*_number_last(t, a, b))


@kernel("Mul")
def mul(t, a, b):
    return t.mul(*_number_last(t, a, b))


@kernel("Sub")
def sub(t, a, b):
    return t.rsub(b, t.scalar(a)) if _is_number(t, a) else t.sub(a, b)


@kernel("Div")
def div(t, a, b):
    if a.dtype in UNSIGNED:
        return divided(t, a, b)[0]
    if a.dtype not in FLOATING:
        return t.div(t.tensor(a), b, rounding_mode="trunc")
    return t.div(t.tensor(a), b)


@kernel("Mod")
def mod(t, a, b, *, fmod=0):
    """The remainder of a quotient towards zero with ``fmod``, else downwards."""
    if a.dtype in UNSIGNED:
        return divided(t, a, b)[1]
    return t.fmod(t.tensor(a), b) if fmod else t.remainder(t.tensor(a), b)


@kernel("Pow")
def power(t, a, b):
    """The base decides about the dtype."""
    a, dtype = t.tensor(a), a.dtype
    if b.dtype in UNSIGNED:
        b = converted(t, b, ir.DataType.INT64)
    if dtype not in FLOATING and b.dtype in FLOATING:
        # To a number, PyTorch would raise whole ones in float32.
        a, b = a.to(ir.DataType.DOUBLE), converted(t, b, ir.DataType.DOUBLE)
    result = t.pow(a, t.number(b))
    is_wider = b.dtype is not dtype and (b.dtype in FLOATING or dtype not in FLOATING)
    return result.to(dtype) if is_wider else result


@kernel("ortrain::Xlogy")
def xlogy(t, x, other):
    return t.xlogy(x, other)


@kernel("Sum")
def total(t, *data_0):
    return reduce(lambda a, b: add(t, a, b), data_0)


@kernel("Mean")
def mean(t, *data_0):
    return total(t, *data_0) / len(data_0) if len(data_0) > 1 else data_0[0]


@kernel("Max")
def largest(t, *data_0):
    return _extreme(t, data_0, "maximum", "min")


@kernel("Min")
def smallest(t, *data_0):
    return _extreme(t, data_0, "minimum", "max")


def _extreme(t, operands, function, bound):
    """Against a number by a bound, which nothing has to load."""

    def step(a, b):
        if a.dtype in UNSIGNED:
            return ordered(t, t.call(f"torch.{function}", ordered(t, a), ordered(t, b)))
        for x, other in ((a, b), (b, a)):
            number = t.number(other)
            if not isinstance(number, (Tensor, Host)) and not _is_nan(number):
                return t.clamp(t.tensor(x), **{bound: number})
        return t.call(f"torch.{function}", a, b)

    return reduce(step, operands)


@kernel("Clip")
def clip(t, input, min=None, max=None):
    if min is None and max is None:
        return input
    if input.dtype in UNSIGNED:
        bounds = [None if bound is None else ordered(t, bound) for bound in (min, max)]
        return ordered(t, t.clamp(ordered(t, input), *bounds))
    bounds = [None if bound is None else t.number(bound) for bound in (min, max)]
    if any(isinstance(bound, (Tensor, Host)) or _is_nan(bound) for bound in bounds):
        bounds = [None if bound is None else t.tensor(bound) for bound in (min, max)]
    return t.clamp(t.tensor(input), *bounds)


# -- comparisons and logic -------------------------------------------------------------------------

_TURNED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq"}


def _comparison(operator, function):
    @kernel(operator)
    def compare(t, a, b):
        if a.dtype in UNSIGNED and function != "eq":
            a, b = turned(t, a), turned(t, b)
        if _is_number(t, a):
            return t.call(f"torch.{_TURNED[function]}", b, t.scalar(a))
        return t.call(f"torch.{function}", a, b)


for _operator, _function in {
    "Equal": "eq", "Greater": "gt", "GreaterOrEqual": "ge", "Less": "lt", "LessOrEqual": "le",
}.items():  # fmt: skip
    _comparison(_operator, _function)


def _binary(operator, function):
    @kernel(operator)
    def binary(t, a, b):
        return t.call(f"torch.{function}", t.tensor(a), t.tensor(b))


for _operator, _function in {
    "And": "logical_and", "Or": "logical_or", "Xor": "logical_xor", "BitwiseAnd": "bitwise_and",
    "BitwiseOr": "bitwise_or", "BitwiseXor": "bitwise_xor",
}.items():  # fmt: skip
    _binary(_operator, _function)


@kernel("BitShift")
def bit_shift(t, x, y, *, direction):
    if direction == "LEFT":
        return t.bitwise_left_shift(x, y)
    if x.dtype in UNSIGNED:
        return shifted_right(t, x, t.number(y))
    return t.bitwise_right_shift(x, y)


@kernel("Where")
def where(t, condition, x, y):
    if _is_number(t, x) and _is_number(t, y):  # two numbers would be of the default dtype
        x = t.tensor(x)
    return t.call("torch.where", condition, t.scalar(x), t.scalar(y))


def _is_number(t, operand):
    return not isinstance(t.scalar(operand), (Tensor, Host))


def _number_last(t, a, b):
    return (b, a) if _is_number(t, a) and not _is_number(t, b) else (t.tensor(a), b)


def _is_nan(number):
    return isinstance(number, float) and math.isnan(number)

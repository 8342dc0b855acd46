"""Arithmetic, elementary functions and selection, element by element."""

from __future__ import annotations

import math

import onnx_ir as ir

from ortrain.autodiff.registry import gradient, no_gradient
from ortrain.graph import shapes
from ortrain.graph.broadcast import unbroadcast

no_gradient(
    "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual",
    "And", "Or", "Not", "Xor", "IsNaN", "IsInf", "BitShift", "BitwiseAnd", "BitwiseOr",
    "BitwiseXor", "BitwiseNot", "BitCast",
    reason="piecewise constant: the derivative is zero wherever it exists",
)  # fmt: skip


@gradient("Ceil", "Floor", "Round", "Sign")
def rounding(g, x):
    """dx = 0: the derivative is zero wherever it exists, and torch delivers zeros, not None"""
    return g.op.Expand(g.op.constant(0, x.dtype), g.op.shape(x))


@gradient("Add", broadcast=True)
def add(g, a, b):
    """da = dy, db = dy"""
    return g.dy, g.dy


@gradient("Sub", broadcast=True)
def sub(g, a, b):
    """da = dy, db = -dy"""
    return g.dy, -g.dy if g.needs(1) else None


@gradient("Mul", broadcast=True)
def mul(g, a, b):
    """da = dy * b, db = dy * a"""
    return g.dy * b if g.needs(0) else None, g.dy * a if g.needs(1) else None


@gradient("Div", broadcast=True)
def div(g, a, b):
    """da = dy / b, db = -dy * y / b"""
    da = g.dy / b
    return da, -(da * g.y) if g.needs(1) else None


@gradient("Pow", broadcast=True)
def pow(g, base, exponent):
    """d base = dy * n * base^(n-1); d n = dy * y * ln(base), 0 for 0^n with n >= 0"""
    base_gradient = None
    if g.needs(0):
        known = shapes.constant(exponent)
        if known is not None and known.size == 1:
            base_gradient = _constant_power(g, base, float(known.reshape(-1)[0]))
        else:
            n = g.op.cast(exponent, base.dtype)
            slope = n * g.op.Pow(base, n - 1)
            base_gradient = g.dy * g.op.Where(g.op.Equal(n, 0), 0, slope)  # not 0 * 0^(-1)
    if not g.needs(1):
        return base_gradient, None
    vanishing = g.op.And(g.op.Equal(base, 0), g.op.GreaterOrEqual(exponent, 0))
    slope = g.y * g.op.Log(g.op.Where(vanishing, 1, base))
    return base_gradient, g.op.cast(g.dy * slope, exponent.dtype)


def _constant_power(g, base, n):
    if n == 0:
        return g.dy * 0
    if n == 1:
        return g.dy
    if n == 2:
        return g.dy * (base * 2)
    if n == 3:
        return g.dy * (base * base * 3)
    if n == 0.5:
        return g.dy * 0.5 / g.y
    return g.dy * (g.op.Pow(base, n - 1) * n)


@gradient("Sqrt")
def sqrt(g, x):
    """dx = dy / (2 y)"""
    return g.dy * 0.5 / g.y


@gradient("Reciprocal")
def reciprocal(g, x):
    """dx = -dy * y²"""
    return -(g.dy * g.y * g.y)


@gradient("Neg")
def neg(g, x):
    """dx = -dy"""
    return -g.dy


@gradient("Abs")
def abs(g, x):
    """dx = dy * sign(x)"""
    return g.dy * g.op.Sign(x)


@gradient("Exp")
def exp(g, x):
    """dx = dy * y"""
    return g.dy * g.y


@gradient("Log")
def log(g, x):
    """dx = dy / x"""
    return g.dy / x


@gradient("Sin")
def sin(g, x):
    """dx = dy * cos(x)"""
    return g.dy * g.op.Cos(x)


@gradient("Cos")
def cos(g, x):
    """dx = -dy * sin(x)"""
    return -(g.dy * g.op.Sin(x))


@gradient("Tan")
def tan(g, x):
    """dx = dy * (1 + y²)"""
    return g.dy + g.dy * g.y * g.y


@gradient("Asin")
def asin(g, x):
    """dx = dy / sqrt(1 - x²)"""
    return g.dy / g.op.Sqrt(1 - x * x)


@gradient("Acos")
def acos(g, x):
    """dx = -dy / sqrt(1 - x²)"""
    return -g.dy / g.op.Sqrt(1 - x * x)


@gradient("Atan")
def atan(g, x):
    """dx = dy / (1 + x²)"""
    return g.dy / (x * x + 1)


@gradient("Sinh")
def sinh(g, x):
    """dx = dy * cosh(x)"""
    return g.dy * g.op.Cosh(x)


@gradient("Cosh")
def cosh(g, x):
    """dx = dy * sinh(x)"""
    return g.dy * g.op.Sinh(x)


@gradient("Asinh")
def asinh(g, x):
    """dx = dy / sqrt(x² + 1)"""
    return g.dy / g.op.Sqrt(x * x + 1)


@gradient("Acosh")
def acosh(g, x):
    """dx = dy / sqrt(x² - 1)"""
    return g.dy / g.op.Sqrt(x * x - 1)


@gradient("Atanh")
def atanh(g, x):
    """dx = dy / (1 - x²)"""
    return g.dy / (1 - x * x)


@gradient("Erf")
def erf(g, x):
    """dx = dy * 2/sqrt(pi) * exp(-x²)"""
    return g.dy * (2 / math.sqrt(math.pi)) * g.op.Exp(-(x * x))


@gradient("Where", broadcast=True)
def where(g, condition, a, b):
    """da = dy where the condition holds, db = dy elsewhere"""
    zero = g.op.constant(0, g.y.dtype)
    da = g.op.Where(condition, g.dy, zero) if g.needs(1) else None
    db = g.op.Where(condition, zero, g.dy) if g.needs(2) else None
    return None, da, db


@gradient("Clip")
def clip(g, x, low=None, high=None):
    """dx = dy where low <= x <= high (as torch: both ends included)"""
    inside = d_low = d_high = None
    if low is not None:
        inside = g.op.GreaterOrEqual(x, low)
        if g.needs(1):
            d_low = unbroadcast(g.op, g.op.Where(inside, 0, g.dy), low, g.y)
    if high is not None:
        below = g.op.LessOrEqual(x, high)
        if g.needs(2):
            d_high = unbroadcast(g.op, g.op.Where(below, 0, g.dy), high, g.y)
        inside = below if inside is None else g.op.And(inside, below)
    dx = g.dy if inside is None else g.dy_where(inside)
    return dx, d_low, d_high


@gradient("Max", "Min", broadcast=True)
def extremum(g, *inputs):
    """dy goes to the operand that won, in equal parts to those that tie (as torch)"""
    if len(inputs) == 1:
        return (g.dy,)
    winners = [g.op.Equal(x, g.y) for x in inputs]
    won = [g.op.cast(each, g.y.dtype) for each in winners]
    count = won[0]
    for other in won[1:]:
        count = count + other
    share = g.dy / count
    if g.steep:
        return tuple(g.op.Where(each, share, g.op.constant(0, g.y.dtype)) for each in winners)
    return tuple(share * w for w in won)


@gradient("Sum", broadcast=True)
def sum(g, *inputs):
    """every input's gradient is dy"""
    return (g.dy,) * len(inputs)


@gradient("Mean", broadcast=True)
def mean(g, *inputs):
    """every input's gradient is dy / n"""
    return (g.dy * (1 / len(inputs)),) * len(inputs)


@gradient("Mod", broadcast=True)
def mod(g, a, b, *, fmod=0):
    """a = q * b + y with a whole q: da = dy, db = -dy * q"""
    return g.dy, g.dy * g.op.Round((g.y - a) / b) if g.needs(1) else None


@gradient("Dropout")
def dropout(g, x, ratio=None, training_mode=None, *, seed=None):
    """dx = dy / (1 - ratio) where the mask that the operator returns is true"""
    if training_mode is None or shapes.constant(training_mode) is not None:
        if training_mode is None or not g.constant(training_mode, "training_mode"):
            return g.dy
        kept = 1 - (0.5 if ratio is None else g.op.cast(ratio, x.dtype))
    else:
        g.unsupported("its training mode is decided at run time")
    return g.dy * g.op.cast(g.output(1, ir.DataType.BOOL), x.dtype) / kept


@gradient("CastLike")
def cast_like(g, x, target_type, *, saturate=1, round_mode="up"):
    """dx = dy in x's dtype"""
    return g.op.cast(g.dy, x.dtype)


@gradient("Cast")
def cast(g, x, *, to, saturate=1, round_mode="up"):
    """dx = dy in x's dtype"""
    return g.op.cast(g.dy, x.dtype)


@gradient("Identity")
def identity(g, x):
    """dx = dy"""
    return g.dy

"""Arithmetic, activations, and selection, element by element."""

from __future__ import annotations

import math

import onnx_ir as ir

from ortrain.autodiff.broadcast import unbroadcast
from ortrain.autodiff.registry import gradient, no_gradient
from ortrain.graph import shapes

no_gradient(
    "Ceil", "Floor", "Round", "Sign", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual",
    "And", "Or", "Not", "Xor", "IsNaN", "IsInf", "BitShift", "BitwiseAnd", "BitwiseOr",
    "BitwiseXor", "BitwiseNot", "BitCast",
    reason="piecewise constant: the derivative is zero wherever it exists",
)  # fmt: skip


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
    """d base = dy * n * base^(n-1); d n = dy * y * ln(base), 0 where base is 0"""
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
    positive = g.op.Greater(base, 0)
    log = g.op.Log(g.op.Where(positive, base, 1))
    return base_gradient, g.op.cast(g.dy * g.y * log, exponent.dtype)


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


@gradient("Sigmoid")
def sigmoid(g, x):
    """dx = dy * y * (1 - y)"""
    return g.dy * (g.y - g.y * g.y)


@gradient("Tanh")
def tanh(g, x):
    """dx = dy * (1 - y²)"""
    return g.dy - g.dy * g.y * g.y


@gradient("Relu")
def relu(g, x):
    """dx = dy where y > 0"""
    return g.dy * g.op.cast(g.op.Greater(g.y, 0), x.dtype)


@gradient("LeakyRelu")
def leaky_relu(g, x, *, alpha=0.01):
    """dx = dy where x > 0, else alpha * dy"""
    return g.op.Where(g.op.Greater(x, 0), g.dy, g.dy * alpha)


@gradient("PRelu", broadcast=True)
def prelu(g, x, slope):
    """dx = dy where x > 0, else slope * dy; d slope = x * dy where x <= 0"""
    positive = g.op.Greater(x, 0)
    dx = g.op.Where(positive, g.dy, g.dy * slope) if g.needs(0) else None
    return dx, g.op.Where(positive, 0, g.dy * x) if g.needs(1) else None


@gradient("ThresholdedRelu")
def thresholded_relu(g, x, *, alpha=1.0):
    """dx = dy where x > alpha"""
    return g.dy * g.op.cast(g.op.Greater(x, alpha), x.dtype)


@gradient("Shrink")
def shrink(g, x, *, bias=0.0, lambd=0.5):
    """dx = dy where |x| > lambd"""
    return g.dy * g.op.cast(g.op.Greater(g.op.Abs(x), lambd), x.dtype)


@gradient("Elu")
def elu(g, x, *, alpha=1.0):
    """dx = dy where x > 0, else dy * (y + alpha)"""
    return g.op.Where(g.op.Greater(x, 0), g.dy, g.dy * (g.y + alpha))


@gradient("Celu")
def celu(g, x, *, alpha=1.0):
    """dx = dy where x > 0, else dy * exp(x / alpha) = dy * (y / alpha + 1)"""
    return g.op.Where(g.op.Greater(x, 0), g.dy, g.dy * (g.y * (1 / alpha) + 1))


@gradient("Selu")
def selu(g, x, *, alpha=1.67326319217681884765625, gamma=1.05070102214813232421875):
    """dx = gamma * dy where x > 0, else dy * (y + alpha * gamma)"""
    return g.dy * g.op.Where(g.op.Greater(x, 0), gamma, g.y + alpha * gamma)


@gradient("Softplus")
def softplus(g, x):
    """dx = dy * sigmoid(x)"""
    return g.dy * g.op.Sigmoid(x)


@gradient("Softsign")
def softsign(g, x):
    """dx = dy / (1 + |x|)² = dy * (1 - |y|)²"""
    rest = 1 - g.op.Abs(g.y)
    return g.dy * rest * rest


@gradient("HardSigmoid")
def hard_sigmoid(g, x, *, alpha=0.2, beta=0.5):
    """dx = alpha * dy where 0 < y < 1"""
    inside = g.op.And(g.op.Greater(g.y, 0), g.op.Less(g.y, 1))
    return g.dy * g.op.Where(inside, g.op.constant(alpha, x.dtype), 0)


@gradient("HardSwish")
def hard_swish(g, x):
    """dx = dy * (x / 3 + 1/2) where |x| < 3, dy above, 0 below"""
    slope = x * (1 / 3) + 0.5
    above = g.op.Where(g.op.GreaterOrEqual(x, 3), 1, slope)
    return g.dy * g.op.Where(g.op.LessOrEqual(x, -3), 0, above)


@gradient("Swish")
def swish(g, x, *, alpha=1.0):
    """with s = sigmoid(alpha x): dx = dy * (s + alpha * y * (1 - s))"""
    s = g.op.Sigmoid(x if alpha == 1 else x * alpha)
    tail = g.y - g.y * s
    return g.dy * (s + (tail if alpha == 1 else tail * alpha))


@gradient("Mish")
def mish(g, x):
    """with t = tanh(softplus(x)): dx = dy * (t + x * (1 - t²) * sigmoid(x))"""
    t = g.op.Tanh(g.op.Softplus(x))
    return g.dy * (t + x * g.op.Sigmoid(x) * (1 - t * t))


@gradient("Gelu")
def gelu(g, x, *, approximate="none"):
    """dx = dy * (Phi(x) + x * phi(x)); tanh form: the derivative of Hendrycks and Gimpel's

    The exact form takes nine passes: with s = x/sqrt(2), Phi = (1 + erf(s))/2 is one HardSigmoid
    of erf(s) (its clipping to [0, 1] never acts), and x * phi(x) = s / exp(s²) / sqrt(pi), where
    an overflow of the exponential gives the right zero.
    """
    if approximate == "tanh":
        k, c = math.sqrt(2 / math.pi), 0.044715
        square = x * x
        t = g.op.Tanh((x * (square * c + 1)) * k)
        inner = (square * (3 * c) + 1) * (x * k)
        return g.dy * ((t + 1) * 0.5 + (inner - inner * t * t) * 0.5)
    s = x * math.sqrt(0.5)
    cdf = g.op.HardSigmoid(g.op.Erf(s), alpha=0.5, beta=0.5)
    tail = (s / g.op.Exp(s * s)) * (1 / math.sqrt(math.pi))
    return g.dy * (cdf + tail)


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
    dx = g.dy if inside is None else g.dy * g.op.cast(inside, x.dtype)
    return dx, d_low, d_high


@gradient("Max", "Min", broadcast=True)
def extremum(g, *inputs):
    """dy goes to the operand that won, in equal parts to those that tie (as torch)"""
    won = [g.op.cast(g.op.Equal(x, g.y), g.y.dtype) for x in inputs]
    if len(inputs) == 1:
        return (g.dy,)
    count = won[0]
    for other in won[1:]:
        count = count + other
    share = g.dy / count
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

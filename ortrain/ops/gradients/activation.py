"""Gradients of activations."""

from __future__ import annotations

import math

import onnx_ir as ir

from ortrain.graph.build import Builder
from ortrain.ops.base import like_first, operator
from ortrain.ops.hardtanh import is_outside


def passed_where(op: Builder, dy: ir.Value, condition: ir.Value, steep: bool) -> ir.Value:
    """The gradient where the condition holds, and 0 elsewhere.

    An infinite one times 0 would be no number, of which PyTorch makes 0 here as well. Where none
    can be infinite, a product serves: of 256 x 3072 floats it takes 1.4 ms, a `Where` 2.0.
    """
    assert dy.dtype is not None
    if steep:
        chosen: ir.Value = op.Where(condition, dy, op.constant(0, dy.dtype))
        return chosen
    return dy * op.cast(condition, dy.dtype)


@operator("ThresholdGradient", types=like_first)
def threshold(
    op: Builder, dy: ir.Value, x: ir.Value, *, threshold: float = 0.0, steep: int = 1
) -> ir.Value:
    """dx = dy where x > threshold; of Relu x may be the output

    Args:
        op: the builder.
        dy: gradient of the output.
        x: of its shape.
        threshold: above which the gradient passes.
        steep: 0 promises that the gradient is finite.
    """
    return passed_where(op, dy, op.Greater(x, threshold), bool(steep))


@operator("HardtanhGradient", types=like_first)
def hardtanh(
    op: Builder, dy: ir.Value, x: ir.Value, *, min_val: float = -1.0, max_val: float = 1.0,
    steep: int = 1,
) -> ir.Value:  # fmt: skip
    """dx = dy but where x <= min_val or x >= max_val; x may be the output

    Args:
        op: the builder.
        dy: gradient of the output.
        x: of its shape.
        min_val: lower bound.
        max_val: upper bound.
        steep: 0 promises that the gradient is finite.
    """
    inside = op.Not(is_outside(op, x, min_val, max_val))
    return passed_where(op, dy, inside, bool(steep))


@operator("LeakyReluGradient", types=like_first)
def leaky_relu(op: Builder, dy: ir.Value, x: ir.Value, *, alpha: float = 0.01) -> ir.Value:
    """dx = dy where x > 0, else alpha * dy"""
    dx: ir.Value = op.Where(op.Greater(x, 0), dy, dy * alpha)
    return dx


@operator("EluGradient", types=like_first)
def elu(op: Builder, dy: ir.Value, x: ir.Value, y: ir.Value, *, alpha: float = 1.0) -> ir.Value:
    """dx = dy where x > 0, else dy * (y + alpha)"""
    dx: ir.Value = op.Where(op.Greater(x, 0), dy, dy * (y + alpha))
    return dx


@operator("SigmoidGradient", types=like_first)
def sigmoid(op: Builder, dy: ir.Value, y: ir.Value) -> ir.Value:
    """dx = dy * y * (1 - y)"""
    return dy * (y - y * y)


@operator("TanhGradient", types=like_first)
def tanh(op: Builder, dy: ir.Value, y: ir.Value) -> ir.Value:
    """dx = dy * (1 - y²)"""
    return dy - dy * y * y


@operator("SoftplusGradient", types=like_first)
def softplus(op: Builder, dy: ir.Value, x: ir.Value) -> ir.Value:
    """dx = dy * sigmoid(x)"""
    return dy * op.Sigmoid(x)


@operator("HardSwishGradient", types=like_first)
def hard_swish(op: Builder, dy: ir.Value, x: ir.Value) -> ir.Value:
    """dx = dy * (x / 3 + 1/2) where |x| < 3, dy above, 0 below"""
    slope = x * (1 / 3) + 0.5
    above = op.Where(op.GreaterOrEqual(x, 3), 1, slope)
    return dy * op.Where(op.LessOrEqual(x, -3), 0, above)


@operator("SiluGradient", types=like_first)
def silu(op: Builder, dy: ir.Value, x: ir.Value) -> ir.Value:
    """with s = sigmoid(x): dx = dy * s * (1 + x * (1 - s))"""
    s = op.Sigmoid(x)
    return dy * (s * ((1.0 - s) * x + 1.0))


@operator("MishGradient", types=like_first)
def mish(op: Builder, dy: ir.Value, x: ir.Value) -> ir.Value:
    """with t = tanh(softplus(x)): dx = dy * (t + x * (1 - t²) * sigmoid(x))"""
    t = op.Tanh(op.Softplus(x))
    return dy * (t + x * op.Sigmoid(x) * (1 - t * t))


@operator("GeluGradient", types=like_first)
def gelu(op: Builder, dy: ir.Value, x: ir.Value, *, approximate: str = "none") -> ir.Value:
    """dx = dy * (Phi(x) + x * phi(x)); tanh form: the derivative of Hendrycks and Gimpel's

    The exact form takes nine passes: with s = x/sqrt(2), Phi = (1 + erf(s))/2 is one HardSigmoid
    of erf(s) (its clipping to [0, 1] never acts), and x * phi(x) = s / exp(s²) / sqrt(pi), where
    an overflow of the exponential gives the right zero.
    """
    if approximate == "tanh":
        k, c = math.sqrt(2 / math.pi), 0.044715
        square = x * x
        t = op.Tanh((x * (square * c + 1)) * k)
        inner = (square * (3 * c) + 1) * (x * k)
        return dy * ((t + 1) * 0.5 + (inner - inner * t * t) * 0.5)
    s = x * math.sqrt(0.5)
    cdf = op.HardSigmoid(op.Erf(s), alpha=0.5, beta=0.5)
    tail = (s / op.Exp(s * s)) * (1 / math.sqrt(math.pi))
    return dy * (cdf + tail)

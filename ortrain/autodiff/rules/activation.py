"""Activations."""

from __future__ import annotations

import numpy as np

from ortrain.autodiff.registry import gradient


@gradient("Sigmoid")
def sigmoid(g, x):
    """dx = dy * y * (1 - y)"""
    return g.composite("SigmoidGradient", g.dy, g.y)


@gradient("Tanh")
def tanh(g, x):
    """dx = dy * (1 - y²)"""
    return g.composite("TanhGradient", g.dy, g.y)


@gradient("Relu")
def relu(g, x):
    """dx = dy where y > 0"""
    return g.composite("ThresholdGradient", g.dy, g.y, threshold=0.0, steep=int(g.steep))


@gradient("LeakyRelu")
def leaky_relu(g, x, *, alpha=0.01):
    """dx = dy where x > 0, else alpha * dy"""
    return g.composite("LeakyReluGradient", g.dy, x, alpha=alpha)


@gradient("PRelu", broadcast=True)
def prelu(g, x, slope):
    """dx = dy where x > 0, else slope * dy; d slope = x * dy where x <= 0"""
    positive = g.op.Greater(x, 0)
    dx = g.op.Where(positive, g.dy, g.dy * slope) if g.needs(0) else None
    return dx, g.op.Where(positive, 0, g.dy * x) if g.needs(1) else None


@gradient("ThresholdedRelu")
def thresholded_relu(g, x, *, alpha=1.0):
    """dx = dy where x > alpha"""
    return g.composite("ThresholdGradient", g.dy, x, threshold=alpha, steep=int(g.steep))


@gradient("Shrink")
def shrink(g, x, *, bias=0.0, lambd=0.5):
    """dx = dy where |x| > lambd"""
    return g.dy_where(g.op.Greater(g.op.Abs(x), lambd))


@gradient("Elu")
def elu(g, x, *, alpha=1.0):
    """dx = dy where x > 0, else dy * (y + alpha)"""
    return g.composite("EluGradient", g.dy, x, g.y, alpha=alpha)


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
    return g.composite("SoftplusGradient", g.dy, x)


@gradient("Softsign")
def softsign(g, x):
    """dx = dy / (1 + |x|)² = dy * (1 - |y|)²"""
    rest = 1 - g.op.Abs(g.y)
    return g.dy * rest * rest


@gradient("ortrain::Hardtanh")
def hardtanh(g, x, *, min_val=-1.0, max_val=1.0):
    """dx = dy where min_val < x < max_val, which it is where y is"""
    bounds = np.array([min_val, max_val])
    told = g.y if (bounds.astype(x.dtype.numpy()).astype(bounds.dtype) == bounds).all() else x
    form = {"min_val": min_val, "max_val": max_val, "steep": int(g.steep)}
    return g.composite("HardtanhGradient", g.dy, told, **form)


@gradient("HardSigmoid")
def hard_sigmoid(g, x, *, alpha=0.2, beta=0.5):
    """dx = alpha * dy where 0 < y < 1"""
    form = {"min_val": 0.0, "max_val": 1.0, "steep": int(g.steep)}
    return g.composite("HardtanhGradient", g.dy, g.y, **form) * alpha


@gradient("HardSwish")
def hard_swish(g, x):
    """dx = dy * (x / 3 + 1/2) where |x| < 3, dy above, 0 below"""
    return g.composite("HardSwishGradient", g.dy, x)


@gradient("Swish")
def swish(g, x, *, alpha=1.0):
    """with s = sigmoid(alpha x): dx = dy * (s + alpha * y * (1 - s))"""
    s = g.op.Sigmoid(x if alpha == 1 else x * alpha)
    tail = g.y - g.y * s
    return g.dy * (s + (tail if alpha == 1 else tail * alpha))


@gradient("Mish")
def mish(g, x):
    """with t = tanh(softplus(x)): dx = dy * (t + x * (1 - t²) * sigmoid(x))"""
    return g.composite("MishGradient", g.dy, x)


@gradient("Gelu")
def gelu(g, x, *, approximate="none"):
    """dx = dy * (Phi(x) + x * phi(x)); tanh form: the derivative of Hendrycks and Gimpel's"""
    return g.composite("GeluGradient", g.dy, x, approximate=approximate)

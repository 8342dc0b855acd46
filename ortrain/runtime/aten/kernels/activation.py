"""Activations."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortrain.graph.shapes import FLOATING
from ortrain.runtime.aten.dtypes import UNSIGNED
from ortrain.runtime.aten.kernels.cast import converted
from ortrain.runtime.aten.table import kernel


@kernel("Relu")
def relu(t, x):
    return t.relu(t.tensor(x))


@kernel("Sigmoid", "ortrain::Sigmoid")
def sigmoid(t, x):
    return t.sigmoid(x)


@kernel("Tanh")
def tanh(t, input):
    return t.tanh(input)


@kernel("PRelu")
def prelu(t, x, slope):
    """The slope is broadcast to the input."""
    x, slope = t.tensor(x), t.tensor(slope)
    if x.dtype in UNSIGNED:  # none is below zero
        return x
    if x.dtype in FLOATING:
        return t.call("torch._prelu_kernel", x, slope)
    return t.where(t.gt(x, 0), x, t.mul(x, slope))


@kernel("LeakyRelu")
def leaky_relu(t, x, *, alpha=0.01):
    return t.nn.leaky_relu(x, alpha)


@kernel("ThresholdedRelu")
def thresholded_relu(t, x, *, alpha=1.0):
    return t.threshold(x, alpha, 0.0)


@kernel("Elu")
def elu(t, x, *, alpha=1.0):
    return t.nn.elu(x, alpha)


@kernel("Selu")
def selu(t, x, *, alpha=1.6732632, gamma=1.050701):
    return t.nn.elu(x, alpha, gamma)


@kernel("Celu")
def celu(t, x, *, alpha=1.0):
    return t.celu(x, alpha)


@kernel("Gelu")
def gelu(t, x, *, approximate="none"):
    return t.nn.gelu(x, approximate=approximate)


@kernel("Swish")
def swish(t, x, *, alpha=1.0):
    return t.nn.silu(x) if alpha == 1.0 else t.mul(x, t.sigmoid(t.mul(x, alpha)))


@kernel("SwiGLU")
def swiglu(t, a, b, *, alpha=1.0):
    return t.mul(swish(t, a, alpha=alpha), b)


@kernel("Mish")
def mish(t, x):
    return t.nn.mish(x)


@kernel("ortrain::Hardtanh")
def hardtanh(t, x, *, min_val=-1.0, max_val=1.0):
    return t.clamp(x, min_val, max_val)


@kernel("HardSigmoid")
def hard_sigmoid(t, x, *, alpha=0.2, beta=0.5):
    """PyTorch's own is ``(x + 3) / 6`` in [0, 1]."""
    if np.float32(alpha) == np.float32(1 / 6) and beta == 0.5:
        return t.nn.hardsigmoid(x)
    return t.clamp(t.add(t.mul(x, alpha), beta), 0.0, 1.0)


@kernel("HardSwish")
def hard_swish(t, x):
    return t.nn.hardswish(x)


@kernel("Softplus")
def softplus(t, x):
    """The line that it becomes is as near as one rounding from 20 or, in float64, 40."""
    return t.nn.softplus(x, 1.0, 40.0 if x.dtype is ir.DataType.DOUBLE else 20.0)


@kernel("Softsign")
def softsign(t, input):
    return t.div(input, t.add(t.abs(input), 1.0))


@kernel("Shrink")
def shrink(t, input, *, bias=0.0, lambd=0.5):
    x = t.tensor(input)
    if x.dtype in FLOATING and bias in (0.0, lambd):
        return t.hardshrink(x, lambd) if bias == 0.0 else t.nn.softshrink(x, lambd)
    dtype, wide = x.dtype, x
    if dtype not in FLOATING:  # a bias may have a fraction
        wide = converted(t, x, ir.DataType.DOUBLE)
    high = t.where(t.gt(wide, lambd), t.sub(wide, bias), 0)
    result = t.where(t.lt(wide, -lambd), t.add(wide, bias), high)
    if dtype in FLOATING:
        return result
    result.dtype = ir.DataType.DOUBLE
    return converted(t, result, dtype)

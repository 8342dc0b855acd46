"""Normalizations."""

from __future__ import annotations

import onnx_ir as ir

from ortrain.autodiff.broadcast import unbroadcast
from ortrain.autodiff.registry import gradient
from ortrain.autodiff.rules.reduce import reduced_count


@gradient("LayerNormalization")
def layer_norm(g, x, scale, bias=None, *, axis=-1, epsilon=1e-5, stash_type=1):
    """with n = (x - mean) / std and d = dy * scale: dx = (d - mean(d) - n * mean(d * n)) / std"""
    length = g.rank(x)
    axes = list(range(axis % length, length))
    _, d_mean, d_inverse = (*g.dys, None, None)[:3]  # the latter two of a second derivative
    n, inverse = _normalized(g, x, axes, epsilon)
    product = g.dy * n
    d_scale = unbroadcast(g.op, product, scale, x) if g.needs(1) else None
    d_bias = unbroadcast(g.op, g.dy, bias, x) if g.needs(2) else None
    if not g.needs(0):
        return None, d_scale, d_bias
    d = g.dy * scale
    mean_d = g.op.ReduceMean(d, axes, keepdims=1)
    mean_dn = g.op.ReduceMean(product * scale, axes, keepdims=1)
    dx = ((d - mean_d) - n * mean_dn) * inverse
    if d_mean is not None:
        dx = dx + g.op.cast(d_mean, x.dtype) / reduced_count(g, x, g.op.constant(axes))
    if d_inverse is not None:
        weight = g.op.cast(d_inverse, x.dtype) / reduced_count(g, x, g.op.constant(axes))
        dx = dx - n * inverse * inverse * weight
    return dx, d_scale, d_bias


def _normalized(g, x, axes, epsilon):
    """(x - mean) / std and 1 / std, from the statistics that the operator itself returns."""
    if x.dtype == ir.DataType.DOUBLE:
        return _standardized(g.op, x, axes, epsilon)  # the operator returns float32 statistics
    mean, inverse = (g.output(i, ir.DataType.FLOAT) for i in (1, 2))
    for value in (mean, inverse):
        if value.shape is None:
            value.shape = ir.Shape([1 if i in axes else d for i, d in enumerate(x.shape)])
    wide = g.op.cast(x, ir.DataType.FLOAT)
    return g.op.cast((wide - mean) * inverse, x.dtype), g.op.cast(inverse, x.dtype)


def _standardized(op, x, axes, epsilon):
    """(x - mean) / std and 1 / std, computed."""
    centred = x - op.ReduceMean(x, axes, keepdims=1)
    variance = op.ReduceMean(centred * centred, axes, keepdims=1)
    inverse = op.Reciprocal(op.Sqrt(variance + epsilon))
    return centred * inverse, inverse


def _through(op, d, n, inverse, axes):
    """(d - mean(d) - n * mean(d * n)) / std: the gradient through a standardization."""
    mean_d = op.ReduceMean(d, axes, keepdims=1)
    mean_dn = op.ReduceMean(d * n, axes, keepdims=1)
    return ((d - mean_d) - n * mean_dn) * inverse


@gradient("RMSNormalization")
def rms_norm(g, x, scale, *, axis=-1, epsilon=1e-5, stash_type=1):
    """with n = x / rms and d = dy * scale: dx = (d - n * mean(d * n)) / rms"""
    op, length = g.op, g.rank(x)
    axes = list(range(axis % length, length))
    inverse = op.Reciprocal(op.Sqrt(op.ReduceMean(x * x, axes, keepdims=1) + epsilon))
    n = x * inverse
    product = g.dy * n
    d_scale = unbroadcast(op, product, scale, x) if g.needs(1) else None
    if not g.needs(0):
        return None, d_scale
    mean_dn = op.ReduceMean(product * scale, axes, keepdims=1)
    return (g.dy * scale - n * mean_dn) * inverse, d_scale


@gradient("InstanceNormalization")
def instance_norm(g, x, scale, bias, *, epsilon=1e-5):
    """as LayerNormalization over the spatial axes, with scale and bias of each channel"""
    op, length = g.op, g.rank(x)
    axes, others = list(range(2, length)), [0, *range(2, length)]
    n, inverse = _standardized(op, x, axes, epsilon)
    d_scale = op.ReduceSum(g.dy * n, others, keepdims=0) if g.needs(1) else None
    d_bias = op.ReduceSum(g.dy, others, keepdims=0) if g.needs(2) else None
    if not g.needs(0):
        return None, d_scale, d_bias
    d = g.dy * op.Reshape(scale, _column(length))
    return _through(op, d, n, inverse, axes), d_scale, d_bias


@gradient("GroupNormalization")
def group_norm(g, x, scale, bias, *, num_groups, epsilon=1e-5, stash_type=1):
    """as LayerNormalization over the groups; scale and bias of a group before opset 21, then of a
    channel"""
    op, length = g.op, g.rank(x)

    def grouped(value):
        rows = op.Reshape(value, [0, num_groups, -1])
        rows.shape = ir.Shape([x.shape[0], num_groups, None])
        return rows

    n, inverse = _standardized(op, grouped(x), [2], epsilon)
    if g.opset < 21:
        dy, row, axes = grouped(g.dy), op.Reshape(scale, [-1, 1]), [0, 2]
        d, product = dy * row, dy * n
    else:
        dy, row, axes = g.dy, op.Reshape(scale, _column(length)), [0, *range(2, length)]
        flat = op.Reshape(n, op.shape(x))
        flat.shape = x.shape
        d, product = grouped(dy * row), dy * flat
    d_scale = op.ReduceSum(product, axes, keepdims=0) if g.needs(1) else None
    d_bias = op.ReduceSum(dy, axes, keepdims=0) if g.needs(2) else None
    if not g.needs(0):
        return None, d_scale, d_bias
    return op.Reshape(_through(op, d, n, inverse, [2]), op.shape(x)), d_scale, d_bias


@gradient("BatchNormalization")
def batch_norm(g, x, scale, bias, mean, var, *, epsilon=1e-5, momentum=0.9, training_mode=0):
    """with given statistics y = scale * n + bias, n = (x - mean) / std; in training mode as
    LayerNormalization over the batch"""
    op, length = g.op, g.rank(x)
    axes, column = [0, *range(2, length)], _column(length)
    if any(dy is not None for dy in g.dys[1:]):
        g.unsupported("a gradient of the running statistics")
    if training_mode:
        n, inverse = _standardized(op, x, axes, epsilon)
    else:
        inverse = op.Reshape(op.Reciprocal(op.Sqrt(var + epsilon)), column)
        n = (x - op.Reshape(mean, column)) * inverse
    d_scale = op.ReduceSum(g.dy * n, axes, keepdims=0) if g.needs(1) or g.needs(4) else None
    d_bias = op.ReduceSum(g.dy, axes, keepdims=0) if g.needs(2) or g.needs(3) else None
    row = op.Reshape(scale, column)
    if training_mode:
        dx = _through(op, g.dy * row, n, inverse, axes) if g.needs(0) else None
        return dx, d_scale, d_bias
    dx = g.dy * (row * inverse) if g.needs(0) else None
    flat = op.Reshape(inverse, [-1])
    d_mean = -(d_bias * scale * flat) if g.needs(3) else None
    d_var = d_scale * scale * flat * flat * -0.5 if g.needs(4) else None
    return dx, d_scale, d_bias, d_mean, d_var


@gradient("LpNormalization")
def lp_norm(g, x, *, axis=-1, p=2):
    """p = 2: dx = (dy - y * sum(dy * y)) / norm; p = 1: dx = (dy - sign(x) * sum(dy * y)) / norm"""
    op = g.op
    norm = op.node("ReduceL2" if p == 2 else "ReduceL1", (x, [axis]), keepdims=1)
    along = op.ReduceSum(g.dy * g.y, [axis], keepdims=1)
    return (g.dy - (g.y if p == 2 else op.Sign(x)) * along) / norm


def _column(length):
    """The shape that sets a vector along the channels."""
    return [-1] + [1] * (length - 2)

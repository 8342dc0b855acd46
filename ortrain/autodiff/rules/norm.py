"""Normalizations."""

from __future__ import annotations

import onnx_ir as ir

from ortrain.autodiff.registry import gradient
from ortrain.ops.gradients.norm import column, standardized, through


@gradient("LayerNormalization")
def layer_norm(g, x, scale, bias=None, *, axis=-1, epsilon=1e-5, stash_type=1):
    """with n = (x - mean) / std and d = dy * scale: dx = (d - mean(d) - n * mean(d * n)) / std"""
    g.rank(x)
    _, d_mean, d_inverse = (*g.dys, None, None)[:3]  # the latter two of a second derivative
    needs = [g.needs(i) for i in range(3)]
    return g.composite(
        "LayerNormalizationGradient", g.dy, x, scale, bias, *_statistics(g, x, axis), d_mean,
        d_inverse if needs[0] else None, axis=axis, epsilon=epsilon, needs=needs,
    )  # fmt: skip


def _statistics(g, x, axis):
    """Mean and 1 / std, as the operator itself returns them; None where it has them coarse."""
    if x.dtype == ir.DataType.DOUBLE:
        return None, None
    found = [g.output(i, ir.DataType.FLOAT) for i in (1, 2)]
    begin = axis % g.rank(x)
    for value in found:
        if value.shape is None:
            value.shape = ir.Shape([1 if i >= begin else d for i, d in enumerate(x.shape)])
    return found


@gradient("RMSNormalization")
def rms_norm(g, x, scale, *, axis=-1, epsilon=1e-5, stash_type=1):
    """with n = x / rms and d = dy * scale: dx = (d - n * mean(d * n)) / rms"""
    g.rank(x)
    needs = [g.needs(0), g.needs(1)]
    return g.composite(
        "RMSNormalizationGradient", g.dy, x, scale, axis=axis, epsilon=epsilon, needs=needs
    )


@gradient("InstanceNormalization")
def instance_norm(g, x, scale, bias, *, epsilon=1e-5):
    """as LayerNormalization over the spatial axes, with scale and bias of each channel"""
    op, length = g.op, g.rank(x)
    axes, others = list(range(2, length)), [0, *range(2, length)]
    n, inverse = standardized(op, x, axes, epsilon)
    d_scale = op.ReduceSum(g.dy * n, others, keepdims=0) if g.needs(1) else None
    d_bias = op.ReduceSum(g.dy, others, keepdims=0) if g.needs(2) else None
    if not g.needs(0):
        return None, d_scale, d_bias
    d = g.dy * op.Reshape(scale, column(length))
    return through(op, d, n, inverse, axes), d_scale, d_bias


@gradient("GroupNormalization")
def group_norm(g, x, scale, bias, *, num_groups, epsilon=1e-5, stash_type=1):
    """as LayerNormalization over the groups; scale and bias of a group before opset 21, then of a
    channel"""
    op, length = g.op, g.rank(x)

    def grouped(value):
        rows = op.Reshape(value, [0, num_groups, -1])
        rows.shape = ir.Shape([x.shape[0], num_groups, None])
        return rows

    n, inverse = standardized(op, grouped(x), [2], epsilon)
    if g.opset < 21:
        dy, row, axes = grouped(g.dy), op.Reshape(scale, [-1, 1]), [0, 2]
        d, product = dy * row, dy * n
    else:
        dy, row, axes = g.dy, op.Reshape(scale, column(length)), [0, *range(2, length)]
        flat = op.Reshape(n, op.shape(x))
        flat.shape = x.shape
        d, product = grouped(dy * row), dy * flat
    d_scale = op.ReduceSum(product, axes, keepdims=0) if g.needs(1) else None
    d_bias = op.ReduceSum(dy, axes, keepdims=0) if g.needs(2) else None
    if not g.needs(0):
        return None, d_scale, d_bias
    return op.Reshape(through(op, d, n, inverse, [2]), op.shape(x)), d_scale, d_bias


@gradient("ortrain::GroupNorm")
def group_norm_with_statistics(g, x, scale, bias, *, num_groups, epsilon=1e-5):
    """as LayerNormalization over the groups, with scale and bias of each channel"""
    wide = ir.DataType.DOUBLE if x.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    statistics = [g.output(i, wide) for i in (1, 2)]
    return g.composite(
        "GroupNormGradient", g.dy, x, scale, *statistics, num_groups=num_groups,
        needs=[g.needs(i) for i in range(3)],
    )  # fmt: skip


@gradient("BatchNormalization")
def batch_norm(g, x, scale, bias, mean, var, *, epsilon=1e-5, momentum=0.9, training_mode=0):
    """with given statistics y = scale * n + bias, n = (x - mean) / std; in training mode as
    LayerNormalization over the batch"""
    length = g.rank(x)
    if any(dy is not None for dy in g.dys[1:]):
        g.unsupported("a gradient of the running statistics")
    needs = [g.needs(i) for i in range(5)]
    if not training_mode:
        read = x if needs[1] or needs[4] else g.like(x)
        return g.composite(
            "BatchNormalizationGradient", g.dy, read, scale, mean, var, epsilon=epsilon,
            needs=needs,
        )  # fmt: skip
    op, axes = g.op, [0, *range(2, length)]
    n, inverse = standardized(op, x, axes, epsilon)
    d_scale = op.ReduceSum(g.dy * n, axes, keepdims=0) if needs[1] or needs[4] else None
    d_bias = op.ReduceSum(g.dy, axes, keepdims=0) if needs[2] or needs[3] else None
    row = op.Reshape(scale, column(length))
    return through(op, g.dy * row, n, inverse, axes) if needs[0] else None, d_scale, d_bias


@gradient("LpNormalization")
def lp_norm(g, x, *, axis=-1, p=2):
    """p = 2: dx = (dy - y * sum(dy * y)) / norm; p = 1: dx = (dy - sign(x) * sum(dy * y)) / norm"""
    op = g.op
    norm = op.node("ReduceL2" if p == 2 else "ReduceL1", (x, [axis]), keepdims=1)
    along = op.ReduceSum(g.dy * g.y, [axis], keepdims=1)
    return (g.dy - (g.y if p == 2 else op.Sign(x)) * along) / norm

"""Gradients of normalizations.

``needs`` has a flag for each output: what nobody asks for is None, and not computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.broadcast import unbroadcast
from ortrain.graph.build import Builder
from ortrain.graph.reduction import reduced_count
from ortrain.ops.base import like_inputs, operator

Gradients = tuple[ir.Value | None, ...]


def _of_channels(node: ir.Node) -> None:
    """Typing: one output is like the input, the others have a number for each channel."""
    x = node.inputs[1]
    assert x is not None
    known = shapes.dims(x)
    shapes.assign(node.outputs[0], x.dtype, x.shape)
    for value in node.outputs[1:]:
        shapes.assign(value, x.dtype, None if known is None else ir.Shape([known[1]]))


@operator(
    "LayerNormalizationGradient",
    outputs=("d_x", "d_scale", "d_bias"),
    types=like_inputs(1, 2, 3),
)
def layer_norm(
    op: Builder,
    dy: ir.Value,
    x: ir.Value,
    scale: ir.Value,
    bias: ir.Value | None = None,
    mean: ir.Value | None = None,
    inverse: ir.Value | None = None,
    d_mean: ir.Value | None = None,
    d_inverse: ir.Value | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    needs: Sequence[int] = (1, 1, 1),
) -> Gradients:
    """with n = (x - mean) / std and d = dy * scale: dx = (d - mean(d) - n * mean(d * n)) / std

    Args:
        op: the builder.
        dy: of the normalized tensor.
        x: of its shape.
        scale: broadcastable to it, as the bias is.
        bias: of which the shape is read.
        mean: float32, with axes of size 1 where it was taken; None has it computed.
        inverse: 1 / std, likewise.
        d_mean: gradient of the mean, where a second derivative asks for it.
        d_inverse: of the inverse, likewise.
        axis: the first that is normalized.
        epsilon: added to the variance.
        needs: which gradients are asked for.
    """
    length = shapes.rank(x)
    assert length is not None
    assert x.dtype is not None
    axes = list(range(axis % length, length))
    if mean is None or inverse is None:
        n, inverse = standardized(op, x, axes, epsilon)
    else:
        assert mean.dtype is not None
        wide = op.cast(x, mean.dtype)
        n, inverse = op.cast((wide - mean) * inverse, x.dtype), op.cast(inverse, x.dtype)
    product = dy * n
    d_scale = unbroadcast(op, product, scale, x) if needs[1] else None
    d_bias = unbroadcast(op, dy, bias, x) if needs[2] and bias is not None else None
    if not needs[0]:
        return None, d_scale, d_bias
    d = dy * scale
    mean_d = op.ReduceMean(d, axes, keepdims=1)
    mean_dn = op.ReduceMean(product * scale, axes, keepdims=1)
    dx = ((d - mean_d) - n * mean_dn) * inverse
    if d_mean is not None:
        dx = dx + op.cast(d_mean, x.dtype) / reduced_count(op, x, op.constant(axes), x)
    if d_inverse is not None:
        weight = op.cast(d_inverse, x.dtype) / reduced_count(op, x, op.constant(axes), x)
        dx = dx - n * inverse * inverse * weight
    return dx, d_scale, d_bias


@operator("RMSNormalizationGradient", outputs=("d_x", "d_scale"), types=like_inputs(1, 2))
def rms_norm(
    op: Builder,
    dy: ir.Value,
    x: ir.Value,
    scale: ir.Value,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    needs: Sequence[int] = (1, 1),
) -> Gradients:
    """with n = x / rms and d = dy * scale: dx = (d - n * mean(d * n)) / rms"""
    length = shapes.rank(x)
    assert length is not None
    axes = list(range(axis % length, length))
    inverse = op.Reciprocal(op.Sqrt(op.ReduceMean(x * x, axes, keepdims=1) + epsilon))
    n = x * inverse
    product = dy * n
    d_scale = unbroadcast(op, product, scale, x) if needs[1] else None
    if not needs[0]:
        return None, d_scale
    mean_dn = op.ReduceMean(product * scale, axes, keepdims=1)
    return (dy * scale - n * mean_dn) * inverse, d_scale


@operator("GroupNormGradient", outputs=("d_x", "d_scale", "d_bias"), types=like_inputs(1, 2, 2))
def group_norm(
    op: Builder,
    dy: ir.Value,
    x: ir.Value,
    scale: ir.Value,
    mean: ir.Value,
    inverse: ir.Value,
    *,
    num_groups: int,
    needs: Sequence[int] = (1, 1, 1),
) -> Gradients:
    """as of LayerNormalization over the groups, with scale and bias of each channel

    Args:
        op: the builder.
        dy: [N, C, ...].
        x: of its shape.
        scale: [C].
        mean: [N, num_groups], of each group.
        inverse: 1 / std, likewise.
        num_groups: that the channels make.
        needs: which gradients are asked for.
    """
    length, dtype = shapes.rank(x), mean.dtype
    assert length is not None
    assert x.dtype is not None
    assert dtype is not None
    groups, axes = [0, num_groups, -1], [0, *range(2, length)]
    wide = op.cast(dy, dtype)
    centred = op.Reshape(op.cast(x, dtype), groups) - op.Unsqueeze(mean, [2])
    inverse = op.Unsqueeze(inverse, [2])
    n = centred * inverse
    product = wide * op.Reshape(n, op.shape(x))
    d_scale = op.cast(op.ReduceSum(product, axes, keepdims=0), x.dtype) if needs[1] else None
    d_bias = op.cast(op.ReduceSum(wide, axes, keepdims=0), x.dtype) if needs[2] else None
    if not needs[0]:
        return None, d_scale, d_bias
    factor = op.Reshape(op.cast(scale, dtype), column(length))
    dx = through(op, op.Reshape(wide * factor, groups), n, inverse, [2])
    return op.cast(op.Reshape(dx, op.shape(x)), x.dtype), d_scale, d_bias


@operator("BatchNormGradient", outputs=("d_input", "d_weight", "d_bias"), types=_of_channels)
def batch_norm(
    op: Builder,
    dy: ir.Value,
    input: ir.Value,
    weight: ir.Value | None,
    mean: ir.Value,
    inverse_std: ir.Value,
    *,
    needs: Sequence[int] = (1, 1, 1),
) -> Gradients:
    """with n = (x - mean) / std: dx = weight / std * (dy - mean(dy) - n * mean(dy * n))

    Args:
        op: the builder.
        dy: [N, C, ...].
        input: of its shape.
        weight: [C] or absent.
        mean: [C], of the batch.
        inverse_std: [C], likewise.
        needs: which gradients are asked for.
    """
    length = shapes.rank(input)
    assert length is not None
    axes = [0, *range(2, length)]
    mean, inverse = (op.Reshape(value, column(length)) for value in (mean, inverse_std))
    n = (input - mean) * inverse
    product = dy * n
    d_weight = op.ReduceSum(product, axes, keepdims=0) if needs[1] else None
    d_bias = op.ReduceSum(dy, axes, keepdims=0) if needs[2] else None
    if not needs[0]:
        return None, d_weight, d_bias
    mean_d = op.ReduceMean(dy, axes, keepdims=1)
    mean_dn = op.ReduceMean(product, axes, keepdims=1)
    factor = inverse if weight is None else inverse * op.Reshape(weight, column(length))
    return ((dy - mean_d) - n * mean_dn) * factor, d_weight, d_bias


@operator(
    "BatchNormalizationGradient",
    outputs=("d_x", "d_scale", "d_bias", "d_mean", "d_var"),
    types=like_inputs(1, 2, 2, 3, 4),
)
def frozen_batch_norm(
    op: Builder,
    dy: ir.Value,
    x: ir.Value,
    scale: ir.Value,
    mean: ir.Value,
    var: ir.Value,
    *,
    epsilon: float = 1e-5,
    needs: Sequence[int] = (1, 1, 1, 1, 1),
) -> Gradients:
    """with given statistics y = scale * n + bias, n = (x - mean) / std: dx = dy * scale / std

    Args:
        op: the builder.
        dy: [N, C, ...].
        x: of its shape; of the gradient of x alone the shape is read.
        scale: [C].
        mean: [C].
        var: [C].
        epsilon: added to the variance.
        needs: which gradients are asked for.
    """
    length = shapes.rank(x)
    assert length is not None
    axes = [0, *range(2, length)]
    inverse = op.Reshape(op.Reciprocal(op.Sqrt(var + epsilon)), column(length))
    n = (x - op.Reshape(mean, column(length))) * inverse
    d_scale = op.ReduceSum(dy * n, axes, keepdims=0) if needs[1] or needs[4] else None
    d_bias = op.ReduceSum(dy, axes, keepdims=0) if needs[2] or needs[3] else None
    row = op.Reshape(scale, column(length))
    dx = dy * (row * inverse) if needs[0] else None
    flat = op.Reshape(inverse, [-1])
    d_mean = -(d_bias * scale * flat) if needs[3] else None
    d_var = d_scale * scale * flat * flat * -0.5 if needs[4] else None
    return dx, d_scale, d_bias, d_mean, d_var


def standardized(
    op: Builder, x: ir.Value, axes: Sequence[int], epsilon: float
) -> tuple[ir.Value, ir.Value]:
    """(x - mean) / std and 1 / std, computed."""
    centred = x - op.ReduceMean(x, axes, keepdims=1)
    variance = op.ReduceMean(centred * centred, axes, keepdims=1)
    inverse = op.Reciprocal(op.Sqrt(variance + epsilon))
    return centred * inverse, inverse


def through(
    op: Builder, d: ir.Value, n: ir.Value, inverse: ir.Value, axes: Sequence[int]
) -> ir.Value:
    """(d - mean(d) - n * mean(d * n)) / std: the gradient through a standardization."""
    mean_d = op.ReduceMean(d, axes, keepdims=1)
    mean_dn = op.ReduceMean(d * n, axes, keepdims=1)
    return ((d - mean_d) - n * mean_dn) * inverse


def column(length: int) -> list[int]:
    """The shape that sets a vector along the channels."""
    return [-1] + [1] * (length - 2)

"""Normalization.

ONNX's own operators take ``epsilon`` as a float32, and are defined to compute mean and variance in
float32 whatever they are given. In float64 their formulas are written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortrain.capture.onnx.translations.base import Translator, aten, refuse, symbolic, translation
from ortrain.graph import shapes


@translation(aten.layer_norm.default)
def layer_norm(
    op: Translator,
    input: ir.Value,
    normalized_shape: Sequence[int],
    weight: ir.Value | None = None,
    bias: ir.Value | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> ir.Value:
    assert input.dtype is not None
    if input.dtype == ir.DataType.DOUBLE:
        axes = list(range(-len(normalized_shape), 0))
        return _scaled(op, _normal(op, input, axes, eps), weight, bias)
    if weight is None:
        weight = op.constant(np.ones(tuple(normalized_shape)), input.dtype)
    return op.LayerNormalization(
        input, weight, bias, axis=-len(normalized_shape), epsilon=float(eps)
    )


@translation(aten.native_layer_norm.default)
def native_layer_norm(
    op: Translator,
    input: ir.Value,
    normalized_shape: Sequence[int],
    weight: ir.Value | None = None,
    bias: ir.Value | None = None,
    eps: float = 1e-5,
) -> tuple[ir.Value, ...]:
    """With the mean and the inverse deviation, whose gradient torch does not follow."""
    axes = list(range(-len(normalized_shape), 0))
    mean = op.ReduceMean(input, axes, keepdims=1)
    centred = op.Sub(input, mean)
    variance = op.ReduceMean(op.Mul(centred, centred), axes, keepdims=1)
    inverse = op.Reciprocal(op.Sqrt(op.Add(variance, float(eps))))
    normal = layer_norm(op, input, normalized_shape, weight, bias, eps)
    return normal, op.ours("StopGradient", mean), op.ours("StopGradient", inverse)


@translation(aten.group_norm.default)
def group_norm(
    op: Translator,
    input: ir.Value,
    num_groups: int,
    weight: ir.Value | None = None,
    bias: ir.Value | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> ir.Value:
    assert input.dtype is not None
    channels = (shapes.dims(input) or ())[1]
    if not isinstance(channels, int):
        raise symbolic("group_norm")
    length = shapes.rank(input)
    assert length is not None
    column = [channels] + [1] * (length - 2)
    if input.dtype == ir.DataType.DOUBLE:
        grouped = _normal(op, op.Reshape(input, [0, num_groups, -1]), [2], eps)
        columns = [None if v is None else op.Reshape(v, column) for v in (weight, bias)]
        return _scaled(op, op.Reshape(grouped, op.Shape(input)), *columns)
    if op.opset >= 21:
        if weight is None:
            weight = op.constant(np.ones(channels), input.dtype)
        if bias is None:
            bias = op.constant(np.zeros(channels), input.dtype)
        return op.GroupNormalization(input, weight, bias, num_groups=num_groups, epsilon=float(eps))
    unit = op.constant(np.ones(num_groups), input.dtype)
    zero = op.constant(np.zeros(num_groups), input.dtype)
    grouped = op.Reshape(input, [0, num_groups, -1])
    normal = op.Reshape(
        op.InstanceNormalization(grouped, unit, zero, epsilon=float(eps)), op.Shape(input)
    )
    columns = [None if v is None else op.Reshape(v, column) for v in (weight, bias)]
    return _scaled(op, normal, *columns)


def _normal(op: Translator, x: ir.Value, axes: Sequence[int], eps: float) -> ir.Value:
    """``(x - mean) / sqrt(variance + eps)`` over some axes."""
    centred = op.Sub(x, op.ReduceMean(x, [*axes], keepdims=1))
    variance = op.ReduceMean(op.Mul(centred, centred), [*axes], keepdims=1)
    return op.Div(centred, op.Sqrt(op.Add(variance, float(eps))))


def _scaled(
    op: Translator, x: ir.Value, weight: ir.Value | None, bias: ir.Value | None
) -> ir.Value:
    """``x * weight + bias``, as far as there are such."""
    if weight is not None:
        x = op.Mul(x, weight)
    return x if bias is None else op.Add(x, bias)


@translation(aten._native_batch_norm_legit_functional.default)
def batch_norm_training(
    op: Translator,
    input: ir.Value,
    weight: ir.Value | None,
    bias: ir.Value | None,
    running_mean: ir.Value | None,
    running_var: ir.Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    assert training, "capture replaces only batch_norm(training=True) by this"
    return op.ours(
        "BatchNorm",
        input,
        weight,
        bias,
        running_mean,
        running_var,
        outputs=5,
        momentum=float(momentum),
        eps=float(eps),
    )


@translation(aten.batch_norm.default)
def batch_norm(
    op: Translator,
    input: ir.Value,
    weight: ir.Value | None,
    bias: ir.Value | None,
    running_mean: ir.Value | None,
    running_var: ir.Value | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> ir.Value:
    assert not training
    assert running_mean is not None
    assert input.dtype is not None
    if (shapes.rank(input) or 0) < 2:
        raise refuse("batch_norm of a vector")
    if input.dtype == ir.DataType.DOUBLE:
        assert running_var is not None
        column = [-1] + [1] * ((shapes.rank(input) or 0) - 2)
        mean, deviation, *affine = (
            None if v is None else op.Reshape(v, column)
            for v in (running_mean, op.Sqrt(op.Add(running_var, float(eps))), weight, bias)
        )
        return _scaled(op, op.Div(op.Sub(input, mean), deviation), *affine)
    if weight is None:
        weight = op.Expand(op.constant(1, input.dtype), op.shape(running_mean))
    if bias is None:
        bias = op.Expand(op.constant(0, input.dtype), op.shape(running_mean))
    return op.BatchNormalization(input, weight, bias, running_mean, running_var, epsilon=float(eps))

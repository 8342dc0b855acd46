"""Normalization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortrain.capture.translations.base import Translator, aten, refuse, symbolic, translation
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
    column = [channels] + [1] * (length - 2)
    if weight is not None:
        normal = op.Mul(normal, op.Reshape(weight, column))
    return normal if bias is None else op.Add(normal, op.Reshape(bias, column))


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
    if weight is None:
        weight = op.Expand(op.constant(1, input.dtype), op.shape(running_mean))
    if bias is None:
        bias = op.Expand(op.constant(0, input.dtype), op.shape(running_mean))
    return op.BatchNormalization(input, weight, bias, running_mean, running_var, epsilon=float(eps))

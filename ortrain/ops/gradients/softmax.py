"""Gradients of softmax, and of the loss that is made of it."""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.ops.base import like_first, like_inputs, operator
from ortrain.ops.cross_entropy import normalizer, row_factors, safe_index


@operator("SoftmaxGradient", types=like_first)
def softmax(op: Builder, dy: ir.Value, y: ir.Value, *, axis: int = -1) -> ir.Value:
    """dx = y * (dy - sum(dy * y))"""
    weighted = dy * y
    return weighted - y * op.ReduceSum(weighted, [axis], keepdims=1)


@operator("LogSoftmaxGradient", types=like_first)
def log_softmax(op: Builder, dy: ir.Value, y: ir.Value, *, axis: int = -1) -> ir.Value:
    """dx = dy - exp(y) * sum(dy)"""
    return dy - op.Exp(y) * op.ReduceSum(dy, [axis], keepdims=1)


@operator("CrossEntropyGradient", types=like_inputs(1))
def cross_entropy(
    op: Builder,
    dloss: ir.Value,
    log_prob: ir.Value,
    target: ir.Value,
    weight: ir.Value | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> ir.Value:
    """dx = (softmax(x) * sum(q) - q) * dloss, where q are the target probabilities times weights

    A row's q is its coefficient at the target plus, with smoothing, a share at every class. The
    result is scaled by each row's factor before the target's entry is subtracted, so that the
    [rows, classes] tensor is passed over three times.

    Args:
        op: the builder.
        dloss: [] or, without a reduction, [...].
        log_prob: [..., C], the logarithm of the softmax.
        target: [...].
        weight: [C] factor of each class.
        ignore_index: as in CrossEntropy.
        label_smoothing: likewise.
        reduction: likewise.
    """
    assert log_prob.dtype is not None
    coefficient, spread = row_factors(
        op, log_prob, target, weight, ignore_index=ignore_index, label_smoothing=label_smoothing
    )
    upstream = dloss
    if reduction == "mean":
        upstream = upstream / normalizer(op, log_prob, target, weight, ignore_index=ignore_index)
    # Where all targets are ignored, the mean is 0 / 0; the gradient of what is ignored is none.
    ignored, zero = op.Equal(target, ignore_index), op.constant(0, log_prob.dtype)
    picked = op.Unsqueeze(op.Where(ignored, zero, coefficient * upstream), [-1])
    total = picked
    shared = None
    if spread is not None:
        shared = op.Unsqueeze(op.Where(ignored, zero, spread * upstream), [-1])
        if weight is None:
            total = picked + shared * op.cast(op.dim(log_prob, -1), log_prob.dtype)
        else:
            total = picked + shared * op.ReduceSum(weight, keepdims=0)
            shared = shared * weight
    dx = op.Exp(log_prob) * total
    if shared is not None:
        dx = dx - shared
    index = safe_index(op, target, ignore_index)
    result: ir.Value = op.ScatterElements(dx, index, -picked, axis=-1, reduction="add")
    return result


def _as_asked(node: ir.Node) -> None:
    unit, to = node.inputs[1], node.attributes.get("to")
    assert unit is not None
    dtype = ir.DataType(to.as_int()) if to is not None and to.as_int() else unit.dtype
    shapes.assign(node.outputs[0], dtype, unit.shape)


@operator("LinearCrossEntropyGradient", types=_as_asked)
def linear_cross_entropy(op: Builder, dloss: ir.Value, unit: ir.Value, *, to: int = 0) -> ir.Value:
    """dx = dloss * unit, the gradient that the forward has made for an upstream gradient of 1

    Args:
        op: the builder.
        dloss: [].
        unit: as LinearCrossEntropy gives it.
        to: dtype of the result, as ONNX counts them; 0 is that of ``unit``.
    """
    result: ir.Value = dloss * unit
    return op.cast(result, ir.DataType(to)) if to else result

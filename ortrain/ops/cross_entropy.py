"""``ortrain::CrossEntropy``: cross entropy of class indices, with everything torch's has."""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.graph.indices import from_the_start
from ortrain.ops.base import operator


def _types(node: ir.Node) -> None:
    logits, target, loss = node.inputs[0], node.inputs[1], node.outputs[0]
    assert logits is not None
    reduction = node.attributes.get("reduction")
    rows = reduction is not None and reduction.as_string() == "none"
    shape = target.shape if rows and target is not None else None if rows else ir.Shape([])
    shapes.assign(loss, logits.dtype, shape)
    if len(node.outputs) > 1:
        shapes.assign(node.outputs[1], logits.dtype, logits.shape)


@operator("CrossEntropy", outputs=("loss", "log_prob"), types=_types)
def cross_entropy(
    op: Builder,
    logits: ir.Value,
    target: ir.Value,
    weight: ir.Value | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> tuple[ir.Value, ir.Value]:
    """Cross entropy over the last axis of ``logits``, as ``torch.nn.functional.cross_entropy``.

    Args:
        op: the builder.
        logits: [..., C], floating. Capture moves torch's class axis to the end.
        target: [...], integer class indices; ``ignore_index`` takes no part.
        weight: [C] factor of each class.
        ignore_index: target value that contributes neither loss nor gradient.
        label_smoothing: share of the loss that is spread evenly over the classes.
        reduction: ``mean`` (over the weights of what takes part), ``sum`` or ``none``.

    Returns:
        The loss ([] or [...]) and the log-probabilities [..., C] that its gradient needs.
    """
    log_prob = op.LogSoftmax(logits, axis=-1)
    coefficient, spread = row_factors(
        op, logits, target, weight, ignore_index=ignore_index, label_smoothing=label_smoothing
    )
    index = from_the_start(op, safe_index(op, target, ignore_index))
    picked = op.Squeeze(op.GatherElements(log_prob, index, axis=-1), [-1])
    rows = op.Neg(op.Mul(picked, coefficient))
    if spread is not None:
        weighted = log_prob if weight is None else op.Mul(log_prob, weight)
        rows = op.Sub(rows, op.Mul(op.ReduceSum(weighted, [-1], keepdims=0), spread))
    # A product would make no number of an infinite logarithm.
    rows = op.Where(op.Equal(target, ignore_index), op.constant(0.0, rows.dtype), rows)
    if reduction == "none":
        return rows, log_prob
    total = op.ReduceSum(rows, keepdims=0)
    if reduction == "mean":
        total = op.Div(total, normalizer(op, logits, target, weight, ignore_index=ignore_index))
    return total, log_prob


def valid(op: Builder, target: ir.Value, ignore_index: int, dtype: ir.DataType) -> ir.Value:
    """1 where the target takes part, else 0."""
    return op.cast(op.Not(op.Equal(target, ignore_index)), dtype)


def safe_index(op: Builder, target: ir.Value, ignore_index: int) -> ir.Value:
    """The targets [..., 1] with ``ignore_index`` replaced by a class that exists."""
    return op.Unsqueeze(op.Where(op.Equal(target, ignore_index), 0, target), [-1])


def row_factors(
    op: Builder,
    logits: ir.Value,
    target: ir.Value,
    weight: ir.Value | None,
    *,
    ignore_index: int,
    label_smoothing: float,
) -> tuple[ir.Value, ir.Value | None]:
    """Each row's factor of its target's log-probability and of the sum over all classes."""
    assert logits.dtype is not None
    takes_part = valid(op, target, ignore_index, logits.dtype)
    coefficient = takes_part
    if weight is not None:
        index = op.Squeeze(safe_index(op, target, ignore_index), [-1])
        coefficient = op.Mul(op.Gather(weight, index, axis=0), takes_part)
    if label_smoothing == 0:
        return coefficient, None
    classes = shapes.dims(logits)
    if classes is not None and isinstance(classes[-1], int):
        spread = op.Mul(takes_part, label_smoothing / classes[-1])
    else:
        count = op.cast(op.dim(logits, -1), logits.dtype)
        spread = op.Div(op.Mul(takes_part, label_smoothing), count)
    return op.Mul(coefficient, 1.0 - label_smoothing), spread


def normalizer(
    op: Builder,
    logits: ir.Value,
    target: ir.Value,
    weight: ir.Value | None,
    *,
    ignore_index: int,
) -> ir.Value:
    """The divisor of ``mean``: the weights of what takes part, as a scalar."""
    factors, _ = row_factors(
        op, logits, target, weight, ignore_index=ignore_index, label_smoothing=0.0
    )
    result: ir.Value = op.ReduceSum(factors, keepdims=0)
    return result


__all__ = ["cross_entropy", "normalizer", "row_factors", "safe_index", "valid"]

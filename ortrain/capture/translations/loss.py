"""Losses."""

from __future__ import annotations

import onnx_ir as ir

from ortrain.capture.translations.base import Translator, aten, translation
from ortrain.graph import shapes

REDUCTIONS = ("none", "mean", "sum")
FLOATING = {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}


@translation(aten.cross_entropy_loss.default)
def cross_entropy(
    op: Translator,
    self: ir.Value,
    target: ir.Value,
    weight: ir.Value | None = None,
    reduction: int = 1,
    ignore_index: int | ir.Value = -100,
    label_smoothing: float = 0.0,
) -> ir.Value:
    logits = classes_last(op, self)
    if target.dtype in FLOATING:
        return _of_probabilities(
            op, logits, classes_last(op, target), weight, reduction, label_smoothing
        )
    if isinstance(ignore_index, ir.Value):  # question answering ignores the sequence length
        target = op.Where(op.Equal(target, op.beside(ignore_index, target)), -100, target)
        ignore_index = -100
    loss, _ = op.ours(
        "CrossEntropy",
        logits,
        target,
        weight,
        outputs=2,
        ignore_index=int(ignore_index),
        label_smoothing=float(label_smoothing),
        reduction=REDUCTIONS[reduction],
    )
    return loss


def classes_last(op: Translator, value: ir.Value) -> ir.Value:
    """[N, C, ...] → [N, ..., C]."""
    length = shapes.rank(value)
    assert length is not None
    return value if length < 3 else op.Transpose(value, perm=[0, *range(2, length), 1])


def _of_probabilities(
    op: Translator,
    logits: ir.Value,
    target: ir.Value,
    weight: ir.Value | None,
    reduction: int,
    label_smoothing: float,
) -> ir.Value:
    """Targets are probabilities [..., C]; ``mean`` divides by the number of rows."""
    log_prob = op.LogSoftmax(logits, axis=-1)
    if label_smoothing:
        assert logits.dtype is not None
        share = op.Div(
            op.constant(label_smoothing, logits.dtype),
            op.cast(op.Squeeze(op.dim(logits, -1), [0]), logits.dtype),
        )
        target = op.Add(op.Mul(target, 1.0 - label_smoothing), share)
    if weight is not None:
        target = op.Mul(target, weight)
    rows = op.Neg(op.ReduceSum(op.Mul(log_prob, target), [-1], keepdims=0))
    return reduced(op, rows, reduction)


def reduced(op: Translator, rows: ir.Value, reduction: int) -> ir.Value:
    """``none``, ``mean`` or ``sum`` over everything."""
    if reduction == 0:
        return rows
    return op.ReduceMean(rows, keepdims=0) if reduction == 1 else op.ReduceSum(rows, keepdims=0)


@translation(aten.mse_loss.default)
def mse_loss(op: Translator, self: ir.Value, target: ir.Value, reduction: int = 1) -> ir.Value:
    difference = op.Sub(self, target)
    return reduced(op, op.Mul(difference, difference), reduction)


@translation(aten.l1_loss.default)
def l1_loss(op: Translator, self: ir.Value, target: ir.Value, reduction: int = 1) -> ir.Value:
    return reduced(op, op.Abs(op.Sub(self, target)), reduction)


@translation(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(
    op: Translator,
    self: ir.Value,
    target: ir.Value,
    weight: ir.Value | None = None,
    pos_weight: ir.Value | None = None,
    reduction: int = 1,
) -> ir.Value:
    """``(1 - t) x + w log(1 + exp(-x))`` with ``w = 1 + (pos_weight - 1) t``."""
    # log(1 + exp(-x)) = log(1 + exp(-|x|)) + max(-x, 0): no overflow for large |x|.
    soft = op.Add(op.Log(op.Add(op.Exp(op.Neg(op.Abs(self))), 1.0)), op.Relu(op.Neg(self)))
    if pos_weight is not None:
        soft = op.Mul(soft, op.Add(op.Mul(op.Sub(pos_weight, 1.0), target), 1.0))
    rows = op.Add(op.Mul(op.Sub(1.0, target), self), soft)
    if weight is not None:
        rows = op.Mul(rows, weight)
    return reduced(op, rows, reduction)

"""Losses."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortrain.capture.onnx.translations.base import Translator, aten, refuse, translation
from ortrain.capture.onnx.translations.means import mean_of
from ortrain.graph import shapes
from ortrain.graph.indices import from_the_start

REDUCTIONS = ("none", "mean", "sum")


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
    if target.dtype in shapes.FLOATING:
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
    return mean_of(op, rows) if reduction == 1 else op.ReduceSum(rows, keepdims=0)


@translation(aten.nll_loss_nd.default)
def nll_loss(
    op: Translator,
    self: ir.Value,
    target: ir.Value,
    weight: ir.Value | None = None,
    reduction: int = 1,
    ignore_index: int | ir.Value = -100,
) -> ir.Value:
    """Minus the target's log-probability, times its class's weight."""
    assert self.dtype is not None
    log_prob = classes_last(op, self)
    ignored = op.Equal(target, op.beside(ignore_index, target))
    index = from_the_start(op, op.Where(ignored, 0, target))
    factor = op.cast(op.Not(ignored), self.dtype)
    if weight is not None:
        factor = op.Mul(op.Gather(weight, index, axis=0), factor)
    picked = op.GatherElements(log_prob, op.Unsqueeze(index, [-1]), axis=-1)
    rows = op.Neg(op.Mul(op.Squeeze(picked, [-1]), factor))
    if reduction != 1:
        return reduced(op, rows, reduction)
    return op.Div(op.ReduceSum(rows, keepdims=0), op.ReduceSum(factor, keepdims=0))


@translation(aten.multilabel_margin_loss.default)
def multilabel_margin_loss(
    op: Translator, self: ir.Value, target: ir.Value, reduction: int = 1
) -> ir.Value:
    """``sum over targets t and others c of max(0, 1 - x[t] + x[c]) / C``; targets end at -1."""
    assert self.dtype is not None
    _expect_rows(self, "multilabel_margin_loss", reduction)
    last = op.constant(np.int64(-1))
    ended = op.CumSum(op.cast(op.Less(target, 0), ir.DataType.INT64), last)
    valid = op.Equal(ended, 0)
    index = from_the_start(op, op.Where(op.Equal(target, -1), 0, target))
    counts = op.cast(valid, self.dtype)
    among = op.ScatterElements(op.zeros_like(self), index, counts, axis=-1, reduction="add")
    other = op.cast(op.Equal(among, 0), self.dtype)
    own = op.Unsqueeze(op.GatherElements(self, index, axis=-1), [-1])
    margins = op.Relu(op.Add(op.Sub(1.0, own), op.Unsqueeze(self, [-2])))
    pairs = op.Mul(op.Mul(margins, op.Unsqueeze(counts, [-1])), op.Unsqueeze(other, [-2]))
    classes = op.cast(op.Squeeze(op.dim(self, -1), [0]), self.dtype)
    return reduced(op, op.Div(op.ReduceSum(pairs, [-2, -1], keepdims=0), classes), reduction)


@translation(aten.multi_margin_loss.default)
def multi_margin_loss(
    op: Translator,
    self: ir.Value,
    target: ir.Value,
    p: float = 1,
    margin: float = 1,
    weight: ir.Value | None = None,
    reduction: int = 1,
) -> ir.Value:
    """``sum over classes c but the target t of max(0, margin - x[t] + x[c])**p * weight[t] / C``.

    Nothing flows where the margin is just kept, as in PyTorch's kernel, and other than in what its
    decomposition clamps.
    """
    _expect_rows(self, "multi_margin_loss", reduction)
    rows = op.Unsqueeze(self, [0]) if shapes.rank(self) == 1 else self
    index = op.Unsqueeze(op.Reshape(target, [-1]), [1])
    margins = op.Relu(op.Add(op.Sub(float(margin), op.GatherElements(rows, index, axis=1)), rows))
    if p == 2:
        margins = op.Mul(margins, margins)
    if weight is not None:
        margins = op.Mul(margins, op.Gather(weight, index))
    classes = op.Range(op.constant(np.int64(0)), op.Squeeze(op.dim(rows, 1), [0]), np.int64(1))
    other = op.Where(op.Equal(classes, index), 0.0, margins)
    return reduced(op, op.ReduceMean(other, [1], keepdims=0), reduction)


def _expect_rows(value: ir.Value, name: str, reduction: int) -> None:
    if shapes.rank(value) == 1 and reduction == 0:
        raise refuse(
            f"{name} of one row without a reduction",
            "PyTorch's trace says that it has another shape than PyTorch gives it",
            "use reduction='sum', or leave this module to eager",
        )


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
    soft = op.Softplus(op.Neg(self))  # log(1 + exp(-x))
    if pos_weight is not None:
        soft = op.Mul(soft, op.Add(op.Mul(op.Sub(pos_weight, 1.0), target), 1.0))
    rows = op.Add(op.Mul(op.Sub(1.0, target), self), soft)
    if weight is not None:
        rows = op.Mul(rows, weight)
    return reduced(op, rows, reduction)


@translation(aten.binary_cross_entropy.default)
def binary_cross_entropy(
    op: Translator,
    self: ir.Value,
    target: ir.Value,
    weight: ir.Value | None = None,
    reduction: int = 1,
) -> ir.Value:
    """``-t log(x) - (1 - t) log(1 - x)``, no logarithm below -100.

    Torch's derivative is not that of the bounded logarithms: it is ``(x - t) / (x (1 - x))``, the
    divisor at least 1e-12, so that it is finite where ``x`` is 0 or 1.
    """
    x, t = (op.ours("StopGradient", value) for value in (self, target))
    rest = op.Sub(1.0, x)
    positive, negative = (op.Max(op.Log(value), -100.0) for value in (x, rest))
    rows = op.Neg(op.Add(op.Mul(t, positive), op.Mul(op.Sub(1.0, t), negative)))
    slope = op.Div(op.Sub(x, t), op.Max(op.Mul(rest, x), 1e-12))
    # Zeros, with the gradients.
    rows = op.Add(rows, op.Mul(op.Sub(self, x), slope))
    rows = op.Add(rows, op.Mul(op.Sub(target, t), op.Sub(negative, positive)))
    return reduced(op, rows if weight is None else op.Mul(rows, weight), reduction)

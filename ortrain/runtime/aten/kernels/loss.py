"""Losses."""

from __future__ import annotations

import onnx_ir as ir

from ortrain.runtime.aten.table import kernel

_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


@kernel("ortrain::CrossEntropy")
def cross_entropy(
    t, logits, target, weight=None, *, ignore_index=-100, label_smoothing=0.0, reduction="mean"
):
    classes, target = logits.size(-1), _long(t, target)
    log_prob = t.log_softmax(logits, -1)
    rows, index = log_prob, target
    if logits.rank != 2:
        rows, index = log_prob.reshape([-1, classes]), target.reshape([-1])
    kind = reduction if label_smoothing == 0 or reduction == "none" else "sum"
    loss, total = t.aten.nll_loss_forward(
        rows, index, weight, _REDUCTIONS[kind], ignore_index, outputs=2
    )
    if label_smoothing != 0:
        # Each row's own share of the loss, and the even one over its classes.
        spread = t.sum(rows if weight is None else t.mul(rows, weight), [-1])
        spread = t.masked_fill(spread, t.eq(index, ignore_index), 0.0)
        if reduction != "none":
            spread = t.sum(spread)
        even = t.div(t.mul(spread, label_smoothing), classes)
        loss = t.sub(t.mul(loss, 1.0 - label_smoothing), even)
        if reduction == "mean":
            loss = t.div(loss, total)
    if reduction == "none" and target.rank != 1:
        loss = loss.reshape(target.shape)
    return loss, log_prob


@kernel("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy_loss(
    t, scores, labels, weights=None, *, ignore_index=None, reduction="mean"
):
    log_prob = t.log_softmax(scores, 1)
    loss = negative_log_likelihood_loss(
        t, log_prob, labels, weights, ignore_index=ignore_index, reduction=reduction
    )
    return loss, log_prob


@kernel("NegativeLogLikelihoodLoss")
def negative_log_likelihood_loss(
    t, input, target, weight=None, *, ignore_index=None, reduction="mean"
):
    """Over axis 1. No label is ignored where ONNX names none: PyTorch refuses one below zero."""
    ignored = -100 if ignore_index is None else ignore_index
    return t.nn.nll_loss_nd(input, _long(t, target), weight, _REDUCTIONS[reduction], ignored)


def _long(t, target):
    """PyTorch takes no labels of int32."""
    target = t.tensor(target)
    if target.dtype is ir.DataType.INT64:
        return target
    dims, target = target.dims, target.to(ir.DataType.INT64)
    target.dims = dims
    return target

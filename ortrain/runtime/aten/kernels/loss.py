"""Losses."""

from __future__ import annotations

import onnx_ir as ir

from ortrain.runtime.aten.lines import Raw
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


@kernel("ortrain::LinearCrossEntropy")
def linear_cross_entropy(
    t, x, weight, target, bias=None, class_weight=None, *, rows, ignore_index=-100,
    label_smoothing=0.0, reduction="mean", product_type=0, needs=(0, 0, 0), node,
):  # fmt: skip
    read = [v.is_graph_output() or len(v.uses()) > 0 for v in node.outputs[1:]]
    read += [False] * (3 - len(read))
    asked = [bool(n) and r for n, r in zip(needs, read, strict=True)]
    found = t.call(
        "linear_loss.linear_cross_entropy", Raw("blas"), x, weight, _long(t, target), bias,
        class_weight, rows=rows, dtype=ir.DataType(product_type) if product_type else x.dtype,
        ignore_index=ignore_index, label_smoothing=label_smoothing, mean=reduction == "mean",
        needs=asked, outputs=1 + sum(asked), is_tuple=True,
    )  # fmt: skip
    loss, *gradients = found
    given = iter(gradients)
    return loss, *(next(given) if each else None for each in asked)


@kernel("ortrain::LinearCrossEntropyGradient")
def linear_cross_entropy_gradient(t, dloss, unit, *, to=0):
    return t.call("linear_loss.scaled", unit, dloss, ir.DataType(to) if to else unit.dtype)


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

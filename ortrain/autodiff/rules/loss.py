"""Losses."""

from __future__ import annotations

import onnx_ir as ir

from ortrain.autodiff.registry import gradient
from ortrain.graph import shapes


@gradient("ortrain::CrossEntropy")
def cross_entropy(
    g, logits, target, weight=None, *, ignore_index=-100, label_smoothing=0.0, reduction="mean"
):
    """dx = (softmax(x) * sum(q) - q) * dloss, where q are the target probabilities times weights"""
    if weight is not None and g.needs(2):
        g.unsupported("the class weights require a gradient")
    op, log_prob = g.op, g.output(1)
    log_prob.shape = logits.shape
    further = g.dys[1] if len(g.dys) > 1 else None  # of a second derivative
    if further is not None:
        further = further - op.Exp(log_prob) * op.ReduceSum(further, [-1], keepdims=1)
    if g.dys[0] is None:
        return further
    dx = g.composite(
        "CrossEntropyGradient", g.dy, log_prob, target, weight, ignore_index=ignore_index,
        label_smoothing=label_smoothing, reduction=reduction,
    )  # fmt: skip
    return dx if further is None else dx + further


@gradient("ortrain::LinearCrossEntropy")
def linear_cross_entropy(
    g, x, weight, target, bias=None, class_weight=None, *, rows, ignore_index=-100,
    label_smoothing=0.0, reduction="mean", product_type=0, needs=(0, 0, 0),
):  # fmt: skip
    """dx, dweight, dbias = dloss * what they are for an upstream gradient of 1"""
    if class_weight is not None and g.needs(4):
        g.unsupported("the class weights require a gradient")
    given, node = {0: x, 1: weight, 3: bias}, g.node
    wanted = [g.needs(i) for i in given]
    node.attributes["needs"] = ir.AttrInt64s("needs", [int(each) for each in wanted])
    units = [g.output(place) if each else None for place, each in enumerate(wanted, 1)]
    shapes.OPERATORS[node.domain, node.op_type](node)
    found = dict.fromkeys(range(5))
    for (i, value), unit in zip(given.items(), units, strict=True):
        if unit is not None:
            to = None if value.dtype == unit.dtype else int(value.dtype)
            found[i] = g.composite("LinearCrossEntropyGradient", g.dy, unit, to=to)
    return tuple(found.values())


@gradient("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy_loss(
    g, scores, labels, weights=None, *, ignore_index=None, reduction="mean"
):
    """dx = (softmax(x) - onehot) * factor; the operator returns the logarithm of the softmax"""
    op = g.op
    log_prob = g.output(1)
    log_prob.shape = scores.shape
    dx = None
    if g.dys[0] is not None:
        factor, index = _picked(g, labels, weights, scores, ignore_index, reduction)
        spread = op.Exp(log_prob) * factor
        dx = op.ScatterElements(spread, index, -factor, axis=1, reduction="add")
    if len(g.dys) > 1 and g.dys[1] is not None:
        through = g.dys[1] - op.Exp(log_prob) * op.ReduceSum(g.dys[1], [1], keepdims=1)
        dx = through if dx is None else dx + through
    return dx


@gradient("NegativeLogLikelihoodLoss")
def negative_log_likelihood_loss(g, x, target, weight=None, *, ignore_index=None, reduction="mean"):
    """dx = -factor at the target, 0 elsewhere"""
    factor, index = _picked(g, target, weight, x, ignore_index, reduction)
    return g.op.ScatterElements(g.op.zeros_like(x), index, -factor, axis=1)


def _picked(g, target, weight, x, ignore_index, reduction):
    """Each row's factor and its target, both with the class axis 1; a target that is to be ignored
    has the factor 0."""
    op = g.op
    if weight is not None and g.needs(2):
        g.unsupported("the class weights require a gradient")
    factor, index = None, target
    if ignore_index is not None:
        ignored = op.Equal(target, ignore_index)
        index = op.Where(ignored, 0, target)
        factor = op.cast(op.Not(ignored), x.dtype)
    if weight is not None:
        rows = op.Gather(weight, index, axis=0)
        factor = rows if factor is None else factor * rows
    upstream = g.dy
    if factor is None:
        factor = op.Expand(op.constant(1, x.dtype), op.Shape(target))
    if reduction == "mean":
        upstream = upstream / op.ReduceSum(factor, keepdims=0)
    each = factor * upstream
    if ignore_index is not None:  # where all are ignored, the mean is 0 / 0
        each = op.Where(ignored, 0, each)
    return op.Unsqueeze(each, [1]), op.Unsqueeze(index, [1])

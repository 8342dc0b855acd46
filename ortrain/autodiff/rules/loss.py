"""Losses."""

from __future__ import annotations

from ortrain.autodiff.registry import gradient
from ortrain.ops.cross_entropy import normalizer, row_factors, safe_index


@gradient("ortrain::CrossEntropy")
def cross_entropy(
    g, logits, target, weight=None, *, ignore_index=-100, label_smoothing=0.0, reduction="mean"
):
    """dx = (softmax(x) * sum(q) - q) * dloss, where q are the target probabilities times weights

    A row's q is its coefficient at the target plus, with smoothing, a share at every class. The
    result is scaled by each row's factor before the target's entry is subtracted, so that the
    [rows, classes] tensor is passed over three times.
    """
    if weight is not None and g.needs(2):
        g.unsupported("the class weights require a gradient")
    op = g.op
    if g.dys[0] is None:
        return None
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    coefficient, spread = row_factors(op, logits, target, weight, **options)
    upstream = g.dy
    if reduction == "mean":
        upstream = upstream / normalizer(op, logits, target, weight, ignore_index=ignore_index)
    picked = op.Unsqueeze(coefficient * upstream, [-1])
    total = picked
    shared = None
    if spread is not None:
        shared = op.Unsqueeze(spread * upstream, [-1])
        if weight is None:
            total = picked + shared * op.cast(op.dim(logits, -1), logits.dtype)
        else:
            total = picked + shared * op.ReduceSum(weight, keepdims=0)
            shared = shared * weight
    dx = op.Exp(g.output(1)) * total
    if shared is not None:
        dx = dx - shared
    index = safe_index(op, target, ignore_index)
    return op.ScatterElements(dx, index, -picked, axis=-1, reduction="add")

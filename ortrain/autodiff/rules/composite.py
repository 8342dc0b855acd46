"""ortrain's own operators. Those without a rule here differentiate through their body."""

from __future__ import annotations

from ortrain.autodiff.registry import gradient, no_gradient
from ortrain.graph.scatter import rows_of_zeros

no_gradient("ortrain::StopGradient", reason="the user's program cut the gradient here")
for _kind in ("Bits", "Uniform", "Normal", "Exponential", "Bernoulli"):
    no_gradient(f"ortrain::Random{_kind}", reason="drawn from the seed")


@gradient("ortrain::Dropout")
def dropout(g, x, seed, index=None, *, ratio, stream):
    """dx = the same dropout of dy: the hash draws the same mask again, so none is saved"""
    return g.op.node("Dropout", (g.dy, seed, index), domain="ortrain", ratio=ratio, stream=stream)


@gradient("ortrain::Embedding")
def embedding(g, weight, indices, *, padding_idx=-1):
    """d weight = zeros, with dy added at the indices; none at padding_idx"""
    dy = g.dy
    if padding_idx >= 0:
        takes_part = g.op.cast(g.op.Not(g.op.Equal(indices, padding_idx)), dy.dtype)
        dy = dy * g.op.Unsqueeze(takes_part, [-1])
    return rows_of_zeros(g.op, weight, indices, dy)


@gradient("ortrain::BatchNorm")
def batch_norm(
    g, x, weight=None, bias=None, running_mean=None, running_var=None, *, momentum=0.1, eps=1e-5
):
    """with n = (x - mean) / std: dx = weight / std * (dy - mean(dy) - n * mean(dy * n))"""
    op, length = g.op, g.rank(x)
    axes = [0, *range(2, length)]
    column = [-1] + [1] * (length - 2)
    mean, inverse = op.Reshape(g.output(1), column), op.Reshape(g.output(2), column)
    n = (x - mean) * inverse
    product = g.dy * n
    d_weight = op.ReduceSum(product, axes, keepdims=0) if weight is not None else None
    d_bias = op.ReduceSum(g.dy, axes, keepdims=0) if bias is not None else None
    if not g.needs(0):
        return None, d_weight, d_bias
    mean_d = op.ReduceMean(g.dy, axes, keepdims=1)
    mean_dn = op.ReduceMean(product, axes, keepdims=1)
    factor = inverse if weight is None else inverse * op.Reshape(weight, column)
    return ((g.dy - mean_d) - n * mean_dn) * factor, d_weight, d_bias

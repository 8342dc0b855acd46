"""Sums, means, norms and extrema over axes, and softmax."""

from __future__ import annotations

from ortrain.autodiff.registry import gradient, no_gradient
from ortrain.graph import reduction, shapes

no_gradient("ArgMax", "ArgMin", "Hardmax", reason="an index: piecewise constant")


def _kept(g, value, x, axes, keepdims):
    """``value`` (an output or its gradient) with the reduced axes back as axes of size 1."""
    if keepdims:
        return value
    if axes is None:
        return g.op.Reshape(value, [1] * g.rank(x))
    return g.op.Unsqueeze(value, axes)


def _nothing_reduced(axes, noop):
    known = shapes.constant(axes)
    return noop and (axes is None or (known is not None and known.size == 0))


@gradient("ReduceSum")
def reduce_sum(g, x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
    """dx = dy, repeated along the reduced axes"""
    if _nothing_reduced(axes, noop_with_empty_axes):
        return g.dy
    return g.op.Expand(_kept(g, g.dy, x, axes, keepdims), g.op.shape(x))


@gradient("ReduceMean")
def reduce_mean(g, x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
    """dx = dy / n, repeated along the reduced axes"""
    if _nothing_reduced(axes, noop_with_empty_axes):
        return g.dy
    dy = _kept(g, g.dy, x, axes, keepdims)
    return g.op.Expand(dy / reduced_count(g, x, axes), g.op.shape(x))


def reduced_count(g, x, axes):
    """The number of elements that one element of the result was reduced from, in x's dtype."""
    g.dims(x)
    return reduction.reduced_count(g.op, x, axes, g.y)


@gradient("ReduceL2")
def reduce_l2(g, x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
    """dx = dy * x / y, and 0 where y is 0 (as torch)"""
    if _nothing_reduced(axes, noop_with_empty_axes):
        return g.dy * g.op.Sign(x)
    y, dy = _kept(g, g.y, x, axes, keepdims), _kept(g, g.dy, x, axes, keepdims)
    zero = g.op.Equal(y, 0)
    return g.op.Where(zero, 0, dy / g.op.Where(zero, 1, y)) * x


@gradient("ReduceL1")
def reduce_l1(g, x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
    """dx = dy * sign(x)"""
    return _kept(g, g.dy, x, axes, keepdims) * g.op.Sign(x)


@gradient("ReduceSumSquare")
def reduce_sum_square(g, x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
    """dx = dy * 2 x"""
    return _kept(g, g.dy * 2, x, axes, keepdims) * x


@gradient("ReduceLogSum")
def reduce_log_sum(g, x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
    """dx = dy / exp(y), repeated along the reduced axes"""
    dy = _kept(g, g.dy / g.op.Exp(g.y), x, axes, keepdims)
    return g.op.Expand(dy, g.op.shape(x))


@gradient("ReduceLogSumExp")
def reduce_log_sum_exp(g, x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
    """dx = dy * exp(x - y)"""
    y, dy = _kept(g, g.y, x, axes, keepdims), _kept(g, g.dy, x, axes, keepdims)
    return g.op.Exp(x - y) * dy


@gradient("ReduceProd")
def reduce_prod(g, x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
    """dx = dy * product of the others: with one zero that alone has any, with two none has"""
    if _nothing_reduced(axes, noop_with_empty_axes):
        return g.dy
    options = {"keepdims": 1, "noop_with_empty_axes": noop_with_empty_axes}
    zero = g.op.Equal(x, 0)
    rest = g.op.Where(zero, 1, x)
    others = g.op.ReduceProd(rest, axes, **options) / rest
    mine = g.op.cast(zero, x.dtype)
    alone = g.op.Equal(g.op.ReduceSum(mine, axes, **options), mine)
    others = g.op.Where(alone, others, g.op.constant(0, x.dtype))  # which may have overflowed
    return _kept(g, g.dy, x, axes, keepdims) * others


@gradient("ReduceMax", "ReduceMin")
def reduce_extremum(g, x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
    """dy goes to the extremum, in equal parts to all that tie (as torch's amax and amin)"""
    if _nothing_reduced(axes, noop_with_empty_axes):
        return g.dy
    y, dy = _kept(g, g.y, x, axes, keepdims), _kept(g, g.dy, x, axes, keepdims)
    won = g.op.cast(g.op.Equal(x, y), x.dtype)
    ties = g.op.ReduceSum(won, axes, keepdims=1, noop_with_empty_axes=noop_with_empty_axes)
    return won * (dy / ties)


@gradient("CumSum")
def cum_sum(g, x, axis, *, exclusive=0, reverse=0):
    """dx = the cumulative sum of dy from the other end"""
    return g.op.CumSum(g.dy, axis, exclusive=exclusive, reverse=1 - reverse)


@gradient("Softmax")
def softmax(g, x, *, axis=-1):
    """dx = y * (dy - sum(dy * y))"""
    return g.composite("SoftmaxGradient", g.dy, g.y, axis=axis)


@gradient("LogSoftmax")
def log_softmax(g, x, *, axis=-1):
    """dx = dy - exp(y) * sum(dy)"""
    return g.composite("LogSoftmaxGradient", g.dy, g.y, axis=axis)

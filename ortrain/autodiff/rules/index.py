"""Gathering and scattering. Where the forward has read or written, no index is out of range."""

from __future__ import annotations

import numpy as np

from ortrain.autodiff.registry import gradient
from ortrain.autodiff.rules.shape import put_back
from ortrain.graph import shapes
from ortrain.graph.indices import as_given
from ortrain.graph.scatter import reduce_places


@gradient("Gather")
def gather(g, data, indices, *, axis=0):
    """d data = zeros, with dy added at the indices"""
    length = g.rank(data)
    axis %= length
    known = shapes.constant(indices)
    if known is not None and known.ndim <= 1 and known.size == 1:
        return _one_row(g, data, int(known.reshape(-1)[0]), axis, keep=known.ndim == 1)
    indices = as_given(indices) or indices
    g.rank(indices)
    if axis:
        g.rank(g.dy)
    return g.composite("GatherGradient", g.dy, g.like(data), indices, axis=axis)


def _one_row(g, data, index, axis, keep):
    """One constant place (a first token): pad dy with zeros instead of scattering it."""
    dy = g.dy if keep else g.op.Unsqueeze(g.dy, [axis])
    size = g.op.dim(data, axis)
    before = size + index if index < 0 else g.op.constant([index], np.dtype(np.int64))
    after = size - before - 1
    zero = g.op.constant([0], np.dtype(np.int64))
    length = g.rank(data)
    low = [before if i == axis else zero for i in range(length)]
    high = [after if i == axis else zero for i in range(length)]
    return g.op.Pad(dy, g.op.Concat(*low, *high, axis=0), 0)


@gradient("GatherElements")
def gather_elements(g, data, indices, *, axis=0):
    """d data = zeros, with dy added at the indices"""
    indices = as_given(indices) or indices
    return g.op.ScatterElements(g.op.zeros_like(data), indices, g.dy, axis=axis, reduction="add")


@gradient("GatherND")
def gather_nd(g, data, indices, *, batch_dims=0):
    """d data = zeros, with dy added at the indices"""
    known = shapes.dims(indices)
    if batch_dims or known is None or not isinstance(known[-1], int):
        return put_back(
            g, data, lambda p: g.op.GatherND(p, indices, batch_dims=batch_dims), repeats=True
        )
    return reduce_places(g.op, g.op.zeros_like(data), indices, g.dy, "add", is_within=True)


@gradient("ScatterND")
def scatter_nd(g, data, indices, updates, *, reduction="none"):
    """d data = dy (zero where overwritten), d updates = dy at the indices"""
    if reduction not in ("none", "add"):
        g.unsupported(f"reduction {reduction!r}")
    d_updates = g.op.GatherND(g.dy, indices) if g.needs(2) else None
    if reduction == "add" or not g.needs(0):
        return g.dy, None, d_updates
    return g.op.ScatterND(g.dy, indices, g.op.zeros_like(updates)), None, d_updates


@gradient("ScatterElements")
def scatter_elements(g, data, indices, updates, *, axis=0, reduction="none"):
    """d data = dy (zero where overwritten), d updates = dy at the indices, or dy to an extremum"""
    indices = as_given(indices) or indices
    if reduction in ("max", "min"):
        return _scattered_extremum(g, data, indices, updates, axis)
    if reduction not in ("none", "add"):
        g.unsupported(f"reduction {reduction!r}")
    d_updates = g.op.GatherElements(g.dy, indices, axis=axis) if g.needs(2) else None
    if reduction == "add" or not g.needs(0):
        return g.dy, None, d_updates
    cleared = g.op.ScatterElements(g.dy, indices, g.op.zeros_like(updates), axis=axis)
    return cleared, None, d_updates


def _scattered_extremum(g, data, indices, updates, axis):
    """In equal parts to all that tie, what was there before among them."""
    stayed = g.op.cast(g.op.Equal(data, g.y), data.dtype)
    reached = g.op.GatherElements(g.y, indices, axis=axis)
    came = g.op.cast(g.op.Equal(updates, reached), data.dtype)
    ties = g.op.ScatterElements(stayed, indices, came, axis=axis, reduction="add")
    share = g.dy / ties
    return stayed * share, None, came * g.op.GatherElements(share, indices, axis=axis)


@gradient("TopK")
def top_k(g, x, k, *, axis=-1, largest=1, sorted=1):
    """dx = zeros with dy at the places that were picked"""
    if g.dys[0] is None:
        return None
    return g.op.ScatterElements(g.op.zeros_like(x), g.output(1, like=g.y), g.dy, axis=axis)


@gradient("Compress")
def compress(g, x, condition, *, axis=None):
    """dx = zeros with dy at the places that were kept"""
    options = {} if axis is None else {"axis": axis}
    return put_back(g, x, lambda places: g.op.Compress(places, condition, **options))

"""Operators that move elements without changing them."""

from __future__ import annotations

import numpy as np

from ortrain.autodiff.registry import gradient, no_gradient
from ortrain.graph import shapes

no_gradient(
    "Shape", "Size", "NonZero", "Range", "ConstantOfShape", "Constant", "EyeLike",
    reason="the result does not depend on the values of its inputs",
)  # fmt: skip


@gradient("Reshape", "Squeeze", "Unsqueeze", "Flatten")
def reshape(g, x, shape=None, *, allowzero=0, axis=1):
    """dx = dy in x's shape"""
    known = shapes.static(x)
    if known is not None:
        return g.op.Reshape(g.dy, known, allowzero=1) if 0 in known else g.op.Reshape(g.dy, known)
    symbols = [d for d in shapes.dims(x) or [None, None] if not isinstance(d, int)]
    if len(symbols) == 1:
        return g.op.Reshape(g.dy, [d if isinstance(d, int) else -1 for d in shapes.dims(x)])
    return g.op.Reshape(g.dy, g.op.Shape(x), allowzero=1)


@gradient("Transpose")
def transpose(g, x, *, perm=None):
    """dx = dy with the inverse permutation"""
    order = perm if perm is not None else list(range(g.rank(x) - 1, -1, -1))
    return g.op.Transpose(g.dy, perm=[int(i) for i in np.argsort(order)])


@gradient("Expand")
def expand(g, x, shape):
    """dx = dy summed over the repeated axes"""
    from ortrain.autodiff.engine import unbroadcast

    return unbroadcast(g.op, g.dy, x, g.y)


@gradient("Concat")
def concat(g, *inputs, axis):
    """each input's gradient is its slice of dy"""
    sizes = [shapes.dims(x)[axis] if shapes.dims(x) else None for x in inputs]
    if all(isinstance(s, int) for s in sizes):
        lengths = g.op.constant(np.array(sizes, np.int64))
    else:
        lengths = g.op.Concat(*(g.op.dim(x, axis) for x in inputs), axis=0)
    parts = g.op.node("Split", (g.dy, lengths), outputs=len(inputs), axis=axis)
    return (parts,) if len(inputs) == 1 else parts


@gradient("Split")
def split(g, x, split=None, *, axis=0, num_outputs=None):
    """dx = the outputs' gradients side by side"""
    parts = [
        g.op.zeros_like(y) if dy is None else dy for y, dy in zip(g.node.outputs, g.dys, strict=True)
    ]
    return g.op.Concat(*parts, axis=axis)


@gradient("Slice")
def slice(g, x, starts, ends, axes=None, steps=None):
    """dx = zeros with dy at the places that the slice took"""
    known = [shapes.constant(v) for v in (starts, ends, axes, steps)]
    unit = steps is None or (known[3] is not None and (known[3] == 1).all())
    if unit and known[0] is not None and known[1] is not None and (axes is None or known[2] is not None):
        return _padded(g, x, known[0], known[1], known[2])
    return _scattered(g, x, starts, ends, axes, steps)


def _padded(g, x, starts, ends, axes):
    """Steps of one between constant bounds: pad dy on both sides."""
    length = g.rank(x)
    axes = range(len(starts)) if axes is None else [int(a) % length for a in axes]
    before = [g.op.constant([0], np.dtype(np.int64))] * length
    after = list(before)
    for axis, start, end in zip(axes, starts.tolist(), ends.tolist(), strict=True):
        size = g.op.dim(x, axis)
        low, high = _bound(g, start, size), _bound(g, end, size)
        before[axis], after[axis] = low, size - g.op.Max(high, low)
    pads = g.op.Concat(*before, *after, axis=0)
    return g.op.Pad(g.dy, pads, 0)


def _bound(g, position, size):
    """A slice's bound as ONNX clamps it, int64 [1]."""
    known = shapes.constant(size)
    if known is not None:
        total = int(known[0])
        place = position + total if position < 0 else position
        return g.op.constant([min(max(place, 0), total)], np.dtype(np.int64))
    if position >= 0:
        return g.op.Min(g.op.constant([position], np.dtype(np.int64)), size)
    return g.op.Max(size + position, 0)


def _scattered(g, x, starts, ends, axes, steps):
    """Any slice: the same slice of the element numbers tells where dy goes."""
    numbers = g.op.Reshape(
        g.op.Range(np.int64(0), g.op.Size(x), np.int64(1)), g.op.Shape(x), allowzero=1
    )
    taken = g.op.Slice(numbers, starts, ends, axes, steps)
    flat = g.op.Expand(g.op.constant(0, x.dtype), g.op.Reshape(g.op.Size(x), [1]))
    total = g.op.ScatterElements(flat, g.op.Reshape(taken, [-1]), g.op.Reshape(g.dy, [-1]), axis=0)
    return g.op.Reshape(total, g.op.Shape(x), allowzero=1)


@gradient("Tile")
def tile(g, x, repeats):
    """dx = dy summed over the copies"""
    length = g.rank(x)
    shape = g.op.shape(x)
    pairs = g.op.Reshape(
        g.op.Concat(g.op.Unsqueeze(repeats, [1]), g.op.Unsqueeze(shape, [1]), axis=1), [-1]
    )
    copies = g.op.Reshape(g.dy, pairs)
    return g.op.ReduceSum(copies, [2 * i for i in range(length)], keepdims=0)


@gradient("Pad")
def pad(g, x, pads, constant_value=None, axes=None, *, mode="constant"):
    """dx = dy without the padding"""
    if mode != "constant":
        g.unsupported(f"mode {mode!r}")
    if g.needs(2):
        g.unsupported("its fill value requires a gradient")
    shape = g.op.shape(x)
    if axes is not None:
        count = g.op.Div(g.op.Size(pads), 2)
        before = g.op.Slice(pads, [0], g.op.Reshape(count, [1]))
        return g.op.Slice(g.dy, before, before + g.op.Gather(shape, axes), axes)
    before = g.op.Slice(pads, [0], [g.rank(x)])
    # A negative pad crops: what was cropped has no gradient, and Pad puts its zeros back.
    low = g.op.Max(before, 0)
    high = low + g.op.Min(shape + g.op.Min(before, 0), shape)
    known = shapes.constant(pads)
    if known is None or (known < 0).any():
        return g.op.Pad(g.dy, g.op.Neg(pads), 0)
    return g.op.Slice(g.dy, low, high, np.arange(g.rank(x)))

"""Operators that move elements without changing them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortrain.autodiff.registry import gradient, no_gradient
from ortrain.graph import shapes
from ortrain.graph.broadcast import unbroadcast
from ortrain.ops.base import attributes_of

no_gradient(
    "Shape",
    "Size",
    "NonZero",
    "Range",
    "ConstantOfShape",
    "Constant",
    "EyeLike",
    "SequenceLength",
    "SequenceEmpty",
    "OptionalHasElement",
    "BlackmanWindow",
    "HammingWindow",
    "HannWindow",
    "MelWeightMatrix",
    "ImageDecoder",
    "NonMaxSuppression",
    reason="the result does not depend smoothly on the values of its inputs",
)
no_gradient(
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
    reason="a random draw",
)
no_gradient(
    "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer",
    reason="acts on strings",
)  # fmt: skip


@gradient("Reshape")
def reshape(g, x, shape, *, allowzero=0):
    """dx = dy in x's shape"""
    return _like(g, g.dy, x)


@gradient("Squeeze", "Unsqueeze")
def squeeze(g, x, axes=None):
    """dx = dy in x's shape"""
    return _like(g, g.dy, x)


@gradient("Flatten")
def flatten(g, x, *, axis=1):
    """dx = dy in x's shape"""
    return _like(g, g.dy, x)


def _like(g, value, x):
    """The value in x's shape, which is spelled out as far as it is known."""
    known = shapes.dims(x) or (None, None)
    unknown = [d for d in known if not isinstance(d, int)]
    if 0 not in known and len(unknown) <= 1:
        return g.op.Reshape(value, [d if isinstance(d, int) else -1 for d in known])
    return g.op.Reshape(value, g.op.shape(x), allowzero=1)


@gradient("Transpose")
def transpose(g, x, *, perm=None):
    """dx = dy with the inverse permutation"""
    order = perm if perm is not None else list(range(g.rank(x) - 1, -1, -1))
    return g.op.Transpose(g.dy, perm=[int(i) for i in np.argsort(order)])


@gradient("Expand")
def expand(g, x, shape):
    """dx = dy summed over the repeated axes"""
    return unbroadcast(g.op, g.dy, x, g.y)


@gradient("Concat")
def concat(g, *inputs, axis):
    """each input's gradient is its slice of dy"""
    sizes = [known[axis] if (known := shapes.dims(x)) else None for x in inputs]
    if all(isinstance(s, int) for s in sizes):
        lengths = g.op.constant(np.array(sizes, np.int64))
    else:
        lengths = g.op.Concat(*(g.op.dim(x, axis) for x in inputs), axis=0)
    return g.op.node("Split", (g.dy, lengths), outputs=len(inputs), axis=axis)


@gradient("Split")
def split(g, x, split=None, *, axis=0, num_outputs=None):
    """dx = the outputs' gradients side by side"""
    both = zip(g.node.outputs, g.dys, strict=True)
    parts = [g.op.zeros_like(y) if dy is None else dy for y, dy in both]
    return g.op.Concat(*parts, axis=axis)


@gradient("Slice")
def slice(g, x, starts, ends, axes=None, steps=None):
    """dx = zeros with dy at the places that the slice took"""
    low, high, over, stride = (shapes.constant(v) for v in (starts, ends, axes, steps))
    unit = steps is None or (stride is not None and (stride == 1).all())
    if unit and low is not None and high is not None and (axes is None or over is not None):
        return _padded(g, x, low, high, over)
    return put_back(g, x, lambda places: g.op.Slice(places, starts, ends, axes, steps))


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


def put_back(g, x, move, *, repeats=False):
    """Any operator that moves elements: moving their numbers tells where dy belongs.

    ``repeats`` says that it may put one element at several places.
    """
    numbers = g.op.Range(np.int64(0), g.op.Size(x), np.int64(1))
    moved = move(g.op.Reshape(numbers, g.op.shape(x), allowzero=1))
    return scatter_flat(g, x, moved, g.dy, repeats=repeats)


def scatter_flat(g, x, places, dy, *, repeats):
    """Zeros of x's shape with dy at places in the flattened x."""
    zeros = g.op.Expand(g.op.constant(0, x.dtype), g.op.Reshape(g.op.Size(x), [1]))
    places, dy = g.op.Reshape(places, [-1]), g.op.Reshape(dy, [-1])
    options = {"reduction": "add"} if repeats else {}
    return _like(g, g.op.ScatterElements(zeros, places, dy, axis=0, **options), x)


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
    if g.needs(2):
        g.unsupported("its fill value requires a gradient")
    if mode == "constant":
        # Negated pads crop what was added, and put zeros back where a negative pad had cropped.
        known = shapes.constant(pads)
        negated = g.op.Neg(pads) if known is None else g.op.constant(-known)
        return g.op.Pad(g.dy, negated, 0, axes)
    return put_back(
        g, x, lambda places: g.op.Pad(places, pads, None, axes, mode=mode), repeats=True
    )


@gradient("Trilu")
def trilu(g, x, k=None, *, upper=1):
    """dx = the same triangle of dy"""
    return g.op.Trilu(g.dy, k, upper=upper)


@gradient("ReverseSequence")
def reverse_sequence(g, x, sequence_lens, *, batch_axis=1, time_axis=0):
    """dx = dy reversed in the same way"""
    return g.op.ReverseSequence(g.dy, sequence_lens, batch_axis=batch_axis, time_axis=time_axis)


@gradient("SpaceToDepth")
def space_to_depth(g, x, *, blocksize, mode="DCR"):
    """dx = dy with its depth back in space"""
    return g.op.DepthToSpace(g.dy, blocksize=blocksize, mode=mode)


@gradient("DepthToSpace")
def depth_to_space(g, x, *, blocksize, mode="DCR"):
    """dx = dy with its blocks back in depth"""
    if mode == "DCR":
        return g.op.SpaceToDepth(g.dy, blocksize=blocksize)
    size = g.op.constant([blocksize], np.dtype(np.int64))
    height, width = g.op.dim(x, 2), g.op.dim(x, 3)
    blocks = g.op.Reshape(g.dy, g.op.Concat([0], [-1], height, size, width, size, axis=0))
    return _like(g, g.op.Transpose(blocks, perm=[0, 1, 3, 5, 2, 4]), x)


@gradient("Resize")
def resize(
    g, x, roi=None, scales=None, sizes=None, *, antialias=0, axes=None,
    coordinate_transformation_mode="half_pixel", cubic_coeff_a=-0.75, exclude_outside=0,
    extrapolation_value=0.0, keep_aspect_ratio_policy="stretch", mode="nearest",
    nearest_mode="round_prefer_floor",
):  # fmt: skip
    """along each axis y = A x, so dx = Aᵀ dy, where A is the identity matrix resized likewise

    Of the nearest it is sums of dy instead, unless the matrix is small: by whole numbers of
    neighbours, and else by the places that come out of resizing 0, 1, 2, …
    """
    if coordinate_transformation_mode == "tf_crop_and_resize":
        g.unsupported("coordinate_transformation_mode 'tf_crop_and_resize'")
    if keep_aspect_ratio_policy != "stretch":
        g.unsupported(f"keep_aspect_ratio_policy {keep_aspect_ratio_policy!r}")
    given = {k: v for k, v in attributes_of(g.node).items() if k != "axes"}
    op, length, dx = g.op, g.rank(x), g.dy
    factors = shapes.constant(scales)
    before, after = (shapes.dims(v) or (None,) * length for v in (x, g.y))
    for place, axis in enumerate(range(length) if axes is None else [a % length for a in axes]):
        if factors is not None and factors.size and factors[place] == 1:
            continue
        if (factors is None or not factors.size) and shapes.same(before[axis], after[axis]):
            continue
        size = op.dim(x, axis)
        if mode == "nearest" and not _is_small(before[axis], after[axis]):
            shape = op.shape(dx)
            stated = factors is not None and factors.size and sizes is None
            factor = float(factors[place]) if stated and factors is not None else 0.0
            lead, rest = (op.Slice(shape, [a], [b]) for a, b in ((0, axis), (axis + 1, length)))
            whole = factor >= 1 and factor.is_integer()
            if whole and (coordinate_transformation_mode, nearest_mode) == ("asymmetric", "floor"):
                apart = op.Reshape(dx, op.Concat(lead, [-1, int(factor)], rest, axis=0))
                dx = op.ReduceSum(apart, [axis + 1], keepdims=0)
                continue
            numbers = [None if v is None else op.Gather(v, [place]) for v in (scales, sizes)]
            row = op.Range(
                np.float32(0), op.cast(op.Squeeze(size, [0]), ir.DataType.FLOAT), np.float32(1)
            )
            places = op.cast(op.Resize(row, None, *numbers, **given), ir.DataType.INT64)
            zeros = op.Expand(op.constant(0, x.dtype), op.Concat(lead, size, rest, axis=0))
            dx = g.composite("GatherGradient", dx, g.like(zeros), places, axis=axis)
            continue
        zeros = op.Expand(op.constant(0, x.dtype), op.Concat(size, size, axis=0))
        if sizes is None:
            one = np.array([1], np.float32)
            target = (op.Concat(op.Gather(scales, [place]), one, axis=0), None)
        else:
            target = (None, op.Concat(op.Gather(sizes, [place]), size, axis=0))
        matrix = op.Resize(op.EyeLike(zeros), None, *target, **given)
        order = [*(i for i in range(length) if i != axis), axis]
        back = [int(i) for i in np.argsort(order)]
        last = axis == length - 1
        dx = op.MatMul(dx if last else op.Transpose(dx, perm=order), matrix)
        dx = dx if last else op.Transpose(dx, perm=back)
    return dx


def _is_small(before, after):
    """Whether a matrix between two sizes takes less time than sums: up to 256 x 256."""
    known = isinstance(before, int) and isinstance(after, int)
    return known and before * after <= 1 << 16

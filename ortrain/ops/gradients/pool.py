"""Gradients of pooling."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.ops.base import like_inputs, operator
from ortrain.ops.gradients.conv import Window, spatial

# Elements of the windows of ones, one for each channel; above, the channels share one.
MOST_ONES = 1 << 20


@operator("MaxPoolGradient", types=like_inputs(1))
def max_pool(
    op: Builder,
    dy: ir.Value,
    x: ir.Value,
    places: ir.Value,
    *,
    kernel_shape: Sequence[int],
    ceil_mode: int = 0,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> ir.Value:
    """dx = zeros, with dy added at the places of the maxima

    Args:
        op: the builder.
        dy: [N, C, ...].
        x: [N, C, ...], of which the shape is read.
        places: int64, of each maximum in its plane, as MaxPool of ours gives them.
        kernel_shape: of the window, as the rest of it is.
        ceil_mode: as in MaxPool.
        dilations: likewise.
        pads: likewise.
        strides: likewise.
    """
    zeros = op.Reshape(op.zeros_like(x), [0, 0, -1])
    flat, updates = (op.Reshape(value, [0, 0, -1]) for value in (places, dy))
    whole = op.ScatterElements(zeros, flat, updates, axis=2, reduction="add")
    dx: ir.Value = op.Reshape(whole, op.shape(x))
    return dx


@operator("AveragePoolGradient", types=like_inputs(1))
def average_pool(
    op: Builder,
    dy: ir.Value,
    x: ir.Value,
    *,
    kernel_shape: Sequence[int],
    pads: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    ceil_mode: int = 0,
    count_include_pad: int = 0,
) -> ir.Value:
    """dx = dy / count, spread over each window: a transposed convolution with a window of ones

    Args:
        op: the builder.
        dy: [N, C, ...].
        x: [N, C, ...], of which the shape is read.
        kernel_shape: of the window.
        pads: the begins, then the ends.
        strides: of the window.
        dilations: of the window.
        ceil_mode: 1 where a last window may hang over the end.
        count_include_pad: 1 where what lies in the padding counts.
    """
    window = Window(op, kernel_shape, pads, strides, dilations)
    length = shapes.dims(x)
    assert length is not None
    assert x.dtype is not None
    assert dy.shape is not None
    area, positions, like = math.prod(kernel_shape), dy.shape[2:], dy
    if (any(window.flat_pads()) and not count_include_pad) or ceil_mode:
        dy = dy / _counts(op, x, dy, window, bool(count_include_pad))
        area = 1
    # What of a window never meets the image is not spread: of 1280 x 1280 over 2 x 2, four places.
    window.kernel = [
        min(k, (size + low - 1) // d + 1) if isinstance(size, int) else k
        for k, d, size, (low, _) in zip(
            kernel_shape, window.dilations, length[2:], window.pads, strict=True
        )
    ]
    channels, count = length[1], math.prod(window.kernel)
    group = channels if isinstance(channels, int) and channels * count <= MOST_ONES else 1
    if group == 1:  # every channel an image of its own
        dy = op.Reshape(dy, op.Concat([-1, 1], window.sizes(like), axis=0))
        dy.shape = ir.Shape([None, 1, *positions])
    ones = op.constant(np.full((group, 1, *window.kernel), 1 / area, x.dtype.numpy()))
    dx: ir.Value = window.transposed(dy, ones, x, group)
    return dx if group > 1 else op.Reshape(dx, op.shape(x))


def _counts(
    op: Builder, x: ir.Value, dy: ir.Value, window: Window, count_include_pad: bool
) -> ir.Value:
    """How many elements each window averages, [1, 1, positions]."""
    rank, kernel = window.rank, window.kernel
    sizes, counts = spatial(x), spatial(dy)
    assert kernel is not None
    assert x.dtype is not None
    if sizes is not None and counts is not None:
        each = []
        for i, (low, high) in enumerate(window.pads):
            starts = np.arange(counts[i]) * window.strides[i] - low
            places = starts[:, None] + np.arange(kernel[i]) * window.dilations[i]
            # In ceil mode the last window hangs over the end, where nothing is counted.
            begin, end = (-low, sizes[i] + high) if count_include_pad else (0, sizes[i])
            each.append(np.sum((begin <= places) & (places < end), axis=1))
        product = functools.reduce(np.multiply.outer, each)
        return op.constant(product.astype(x.dtype.numpy())[None, None])
    # A convolution of ones.
    ones = op.Expand(op.constant(1, x.dtype), op.Concat([1, 1], window.sizes(x), axis=0))
    pads = window.flat_pads()
    if count_include_pad and any(pads):
        ones = op.Pad(ones, [0, 0, *pads[:rank], 0, 0, *pads[rank:]], 1)
        pads = [0] * (2 * rank)
    taps = op.constant(np.ones((1, 1, *kernel), x.dtype.numpy()))
    found: ir.Value = op.Conv(ones, taps, pads=pads, **window.steps())
    return found

"""Convolutions.

The input gradient is a transposed convolution. The weight gradient has four spellings, chosen by
what is known statically; measured on stock onnxruntime against torch's own, times in ms:

- taps: slices of the padded input, one for each kernel position, side by side in one matrix
  product. The rule: 0.73 (torch 1.05) for 8x64x14x14, 3x3, 64 channels.
- a product and sum for each tap, where every channel is convolved by itself: 0.36 (torch 0.08),
  against 1.19 for the convolution below.
- taps in one product for each group: 0.72 (torch 0.23), against 1.37.
- a convolution of input and output gradient, batch and channels swapped, for few input channels
  under a large kernel, kernels that do not overlap, and whatever is unknown: 0.48 against 1.30 for
  the stem of a ResNet.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from ortrain.autodiff.registry import Gradient, gradient
from ortrain.graph import shapes

# More slices than this cost more than the convolution that needs none.
MOST_TAPS = 64


@gradient("Conv")
def conv(
    g, x, w, b=None, *, auto_pad="NOTSET", dilations=None, group=1, kernel_shape=None, pads=None,
    strides=None,
):  # fmt: skip
    """dx = transposed convolution of dy, dw = correlation of x and dy, db = sum of dy"""
    frame = Frame(g, x, w, g.y, auto_pad, dilations, kernel_shape, pads, strides)
    dx = frame.transposed(g.dy, w, x, group) if g.needs(0) else None
    dw = frame.weight_gradient(x, g.dy, w, group) if g.needs(1) else None
    return dx, dw, _bias_gradient(g, x) if g.needs(2) else None


@gradient("ConvTranspose")
def conv_transpose(
    g, x, w, b=None, *, auto_pad="NOTSET", dilations=None, group=1, kernel_shape=None,
    output_padding=None, output_shape=None, pads=None, strides=None,
):  # fmt: skip
    """dx = convolution of dy, dw = correlation of dy and x, db = sum of dy"""
    frame = Frame(g, x, w, g.y, "NOTSET", dilations, kernel_shape, pads, strides)
    extra = output_padding or [0] * frame.rank
    if any(e >= s for e, s in zip(extra, frame.strides, strict=True)):
        g.unsupported("output_padding is as large as the stride")
    if output_shape or auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        frame.pads = _implied_pads(g, frame, x, w, auto_pad, extra)
    dx = dw = None
    if g.needs(0):
        dx = g.op.Conv(g.dy, w, group=group, pads=frame.flat_pads(), **frame.steps())
    if g.needs(1):
        dw = frame.weight_gradient(g.dy, x, w, group)
    return dx, dw, _bias_gradient(g, x) if g.needs(2) else None


def _bias_gradient(g, x):
    return g.op.ReduceSum(g.dy, [0, *range(2, g.rank(x))], keepdims=0)


def _implied_pads(g: Gradient, frame, x, w, auto_pad, extra):
    """The pads that give a transposed convolution its output's size."""
    sizes, wanted = numbers(g.dims(x)[2:]), numbers(g.dims(g.y)[2:])
    if sizes is None or wanted is None or frame.kernel is None:
        g.unsupported("its pads follow from sizes that are known at run time only")
    result = []
    rows = zip(sizes, wanted, frame.kernel, frame.strides, frame.dilations, extra, strict=True)
    for size, want, k, stride, dilation, more in rows:
        total = max(0, (size - 1) * stride + (k - 1) * dilation + 1 + more - want)
        small, large = total // 2, total - total // 2
        result.append((small, large) if auto_pad == "SAME_UPPER" else (large, small))
    return result


class Frame:
    """How a window moves over an image: kernel, strides, dilations and pads, spelled out.

    Attributes:
        rank: number of spatial axes.
        kernel: sizes of the window, None where they are unknown.
        pads: (begin, end) of each spatial axis.
    """

    def __init__(self, g: Gradient, x, w, y, auto_pad, dilations, kernel_shape, pads, strides):
        self.g, self.op = g, g.op
        self.rank = rank = g.rank(x) - 2
        self.strides, self.dilations = strides or [1] * rank, dilations or [1] * rank
        self.kernel = kernel_shape or numbers(g.dims(w)[2:])
        flat = list(pads or [0] * (2 * rank))
        self.pads = list(zip(flat[:rank], flat[rank:], strict=True))
        if auto_pad == "VALID":
            self.pads = [(0, 0)] * rank
        elif auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            self.pads = [self._same(x, i, auto_pad) for i in range(rank)]

    def _same(self, x, i, auto_pad):
        """The pads with which the output has the input's size, divided by the stride."""
        stride, size = self.strides[i], self.g.dims(x)[2 + i]
        if self.kernel is None or (stride != 1 and not isinstance(size, int)):
            self.g.unsupported("auto_pad over sizes that are known at run time only")
        reach = (self.kernel[i] - 1) * self.dilations[i]
        total = reach
        if stride != 1:
            total = max(0, (-(-size // stride) - 1) * stride + reach + 1 - size)
        small, large = total // 2, total - total // 2
        return (small, large) if auto_pad == "SAME_UPPER" else (large, small)

    def flat_pads(self):
        return [begin for begin, _ in self.pads] + [end for _, end in self.pads]

    def steps(self):
        return {"strides": self.strides, "dilations": self.dilations}

    def transposed(self, dy, w, x, group):
        """The transposed convolution of dy, of exactly x's size."""
        sizes, counts = numbers(self.g.dims(x)[2:]), numbers((shapes.dims(dy) or (None,) * 3)[2:])
        begin = [low for low, _ in self.pads]
        steps = {**self.steps(), "group": group}
        if all(s == 1 for s in self.strides):  # nothing that a stride might have passed over
            return self.op.ConvTranspose(dy, w, pads=self.flat_pads(), **steps)
        if self.kernel is not None and sizes is not None and counts is not None:
            surplus = [
                (n - 1) * s + (k - 1) * d + 1 - low - size
                for n, s, k, d, low, size in zip(
                    counts, self.strides, self.kernel, self.dilations, begin, sizes, strict=True
                )
            ]
            pads = begin + [max(s, 0) for s in surplus]
            extra = [max(-s, 0) for s in surplus]
            return self.op.ConvTranspose(dy, w, pads=pads, output_padding=extra, **steps)
        # As long as any input could have been, then cut to this one's size.
        wide = self.op.ConvTranspose(
            dy, w, pads=begin + [0] * self.rank, output_padding=[s - 1 for s in self.strides],
            **steps,
        )  # fmt: skip
        axes = list(range(2, 2 + self.rank))
        return self.op.Slice(wide, [0] * self.rank, self.sizes(x), axes)

    def sizes(self, value):
        """The spatial sizes as an int64 tensor."""
        known = numbers(self.g.dims(value)[2:])
        if known is not None:
            return self.op.constant(np.array(known, np.int64))
        return self.op.Shape(value, start=2)

    def weight_gradient(self, image, dy, w, group):
        """dw[m, c, tap] = sum over batch and positions of dy[n, m, p] * image[n, c, p * s + tap]"""
        kernel, dims = self.kernel, shapes.dims(w)
        if kernel is None or math.prod(kernel) > MOST_TAPS:
            return self._swapped(image, dy, w, group)
        outer, inner = dims[:2] if dims is not None else (None, None)
        if group > 1 and inner == 1 and outer == group:
            return self._depthwise(image, dy, w)
        if group > 1:
            known = isinstance(outer, int) and isinstance(inner, int)
            return (self._grouped if known else self._swapped)(image, dy, w, group)
        apart = all(k == s for k, s in zip(kernel, self.strides, strict=True)) and max(kernel) > 1
        few = isinstance(inner, int) and inner <= 4 and max(kernel) >= 5
        return self._swapped(image, dy, w, 1) if apart or few else self._taps(image, dy)

    def _taps(self, image, dy):
        """Channels last: [positions, taps * channels], by one matrix product with dy."""
        op, rank = self.op, self.rank
        last = [0, *range(2, 2 + rank), 1]
        slices = self._slices(op.Transpose(self._padded(image), perm=last), dy, first=1)
        columns = slices[0] if len(slices) == 1 else op.Concat(*slices, axis=-1)
        columns = self._rows(columns, image, len(slices))
        rows = op.Reshape(op.Transpose(dy, perm=[1, 0, *range(2, 2 + rank)]), [0, -1])
        product = op.Reshape(op.MatMul(rows, columns), [0, *(self.kernel or []), -1])
        return op.Transpose(product, perm=[0, 1 + rank, *range(1, 1 + rank)])

    def _rows(self, columns, image, taps):
        channels = self.g.dims(image)[1]
        if isinstance(channels, int):
            return self.op.Reshape(columns, [-1, taps * channels])
        width = self.op.dim(image, 1) * taps
        return self.op.Reshape(columns, self.op.Concat([-1], width, axis=0))

    def _depthwise(self, image, dy, w):
        """Channels last: for each tap the sum of slice * dy."""
        op, rank = self.op, self.rank
        last = [0, *range(2, 2 + rank), 1]
        slices = self._slices(op.Transpose(self._padded(image), perm=last), dy, first=1)
        dy, axes = op.Transpose(dy, perm=last), list(range(1 + rank))
        sums = [op.Unsqueeze(op.ReduceSum(s * dy, axes, keepdims=0), [1]) for s in slices]
        return op.Reshape(op.Concat(*sums, axis=1), op.shape(w))

    def _grouped(self, image, dy, w, group):
        """For each image and group a matrix product of dy and the taps, then a sum over images."""
        op = self.op
        outer, inner = self.g.dims(w)[:2]
        slices = self._slices(self._padded(image), dy, first=2)
        taps = op.Concat(*(op.Unsqueeze(s, [2]) for s in slices), axis=2)
        assert isinstance(outer, int)
        assert isinstance(inner, int)
        columns = op.Reshape(taps, [0, group, inner * len(slices), -1])
        rows = op.Reshape(dy, [0, group, outer // group, -1])
        product = op.MatMul(rows, op.Transpose(columns, perm=[0, 1, 3, 2]))
        return op.Reshape(op.ReduceSum(product, [0], keepdims=0), op.shape(w))

    def _swapped(self, image, dy, w, group):
        """A convolution over images: image and dy with batch and channels swapped."""
        op, rank = self.op, self.rank
        swap = [1, 0, *range(2, 2 + rank)]
        if group == 1:
            batch = op.Transpose(image, perm=swap)
        else:  # [N, g, c, ...] → [c, g * N, ...]: the groups become groups of images
            sizes = self.sizes(image)
            parts = op.Reshape(image, op.Concat([0, group, -1], sizes, axis=0))
            order = op.Transpose(parts, perm=[2, 1, 0, *range(3, 3 + rank)])
            batch = op.Reshape(order, op.Concat([0, -1], sizes, axis=0))
        full = op.Conv(
            batch, op.Transpose(dy, perm=swap), group=group, pads=self.flat_pads(),
            strides=self.dilations, dilations=self.strides,
        )  # fmt: skip
        if any(s != 1 for s in self.strides):  # positions that a stride passed over
            axes = list(range(2, 2 + rank))
            size = self.kernel if self.kernel is not None else self.sizes(w)
            full = op.Slice(full, [0] * rank, size, axes)
        return op.Transpose(full, perm=swap)

    def _padded(self, image):
        if not any(self.flat_pads()):
            return image
        flat = self.flat_pads()
        around = [0, 0, *flat[: self.rank], 0, 0, *flat[self.rank :]]
        return self.op.Pad(image, around, 0)

    def _slices(self, padded, dy, first):
        """What each tap of the kernel sees: a strided slice each, the spatial axes from `first`."""
        kernel = self.kernel or []
        if all(k == 1 for k in kernel) and all(s == 1 for s in self.strides):
            return [padded]
        axes = list(range(first, first + self.rank))
        strides, dilations = np.array(self.strides), np.array(self.dilations)
        counts = numbers(self.g.dims(dy)[2:])
        if counts is None:
            reach = (self.op.Shape(dy, start=2) - 1) * self.op.constant(strides) + 1
        slices = []
        for tap in itertools.product(*map(range, kernel)):
            start = np.array(tap) * dilations
            if counts is None:
                end = reach + self.op.constant(start)
            else:
                end = start + (np.array(counts) - 1) * strides + 1
            slices.append(self.op.Slice(padded, start, end, axes, self.strides))
        return slices


def numbers(dims: Sequence[shapes.Dim]) -> list[int] | None:
    """The dimensions as a list, None where one of them is unknown."""
    known = [d for d in dims if isinstance(d, int)]
    return known if len(known) == len(dims) else None

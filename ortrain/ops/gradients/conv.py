"""Gradients of convolutions.

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
from typing import Any

import numpy as np
import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.ops.base import operator

# More slices than this cost more than the convolution that needs none.
MOST_TAPS = 64

Gradients = tuple[ir.Value | None, ...]


def _types(node: ir.Node) -> None:
    dy, x, w = node.inputs[:3]
    channels = shapes.dims(dy)
    for value, source in zip(node.outputs, (x, w), strict=False):
        if source is not None:
            shapes.assign(value, source.dtype, source.shape)
    if dy is not None and len(node.outputs) > 2:
        shape = None if channels is None else ir.Shape([channels[1]])
        shapes.assign(node.outputs[2], dy.dtype, shape)


@operator("ConvGradient", outputs=("d_x", "d_w", "d_b"), types=_types)
def conv(
    op: Builder,
    dy: ir.Value,
    x: ir.Value,
    w: ir.Value,
    *,
    pads: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    kernel_shape: Sequence[int] | None = None,
    group: int = 1,
    needs: Sequence[int] = (1, 1, 1),
) -> Gradients:
    """dx = transposed convolution of dy, dw = correlation of x and dy, db = sum of dy

    Args:
        op: the builder.
        dy: [N, M, ...].
        x: [N, C, ...]; of the gradient of x alone the shape is read.
        w: [M, C / group, ...]; of the gradient of w alone the shape is read.
        pads: the begins, then the ends.
        strides: of the window.
        dilations: of the window.
        kernel_shape: of the window, None where it is not known.
        group: into how many groups the channels are divided.
        needs: which gradients are asked for.
    """
    window = Window(op, kernel_shape, pads, strides, dilations)
    dx = window.transposed(dy, w, x, group) if needs[0] else None
    dw = window.weight_gradient(x, dy, w, group) if needs[1] else None
    return dx, dw, window.bias_gradient(dy) if needs[2] else None


@operator("ConvTransposeGradient", outputs=("d_x", "d_w", "d_b"), types=_types)
def conv_transpose(
    op: Builder,
    dy: ir.Value,
    x: ir.Value,
    w: ir.Value,
    *,
    pads: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    kernel_shape: Sequence[int] | None = None,
    output_padding: Sequence[int] | None = None,
    group: int = 1,
    needs: Sequence[int] = (1, 1, 1),
) -> Gradients:
    """dx = convolution of dy, dw = correlation of dy and x, db = sum of dy

    Args:
        op: the builder.
        dy: [N, M, ...].
        x: [N, C, ...]; of the gradient of x alone nothing is read.
        w: [C, M / group, ...]; of the gradient of w alone the shape is read.
        pads: cut from the result: the begins, then the ends.
        strides: of the window.
        dilations: of the window.
        kernel_shape: of the window, None where it is not known.
        output_padding: rows and columns behind the result's end that no window reaches.
        group: into how many groups the channels are divided.
        needs: which gradients are asked for.
    """
    window = Window(op, kernel_shape, pads, strides, dilations)
    dx = dw = None
    if needs[0]:
        dx = op.Conv(dy, w, group=group, pads=window.flat_pads(), **window.steps())
    if needs[1]:
        dw = window.weight_gradient(dy, x, w, group)
    return dx, dw, window.bias_gradient(dy) if needs[2] else None


class Window:
    """How a window moves over an image: kernel, strides, dilations and pads, spelled out.

    Attributes:
        rank: number of spatial axes.
        kernel: sizes of the window, None where they are unknown.
        pads: (begin, end) of each spatial axis.
    """

    def __init__(
        self,
        op: Builder,
        kernel: Sequence[int] | None,
        pads: Sequence[int],
        strides: Sequence[int],
        dilations: Sequence[int],
    ) -> None:
        self.op, self.rank = op, len(strides)
        self.kernel = None if kernel is None else list(kernel)
        self.strides, self.dilations = list(strides), list(dilations)
        self.pads = list(zip(pads[: self.rank], pads[self.rank :], strict=True))

    def flat_pads(self) -> list[int]:
        """The begins, then the ends."""
        return [begin for begin, _ in self.pads] + [end for _, end in self.pads]

    def steps(self) -> dict[str, Any]:
        """As attributes."""
        return {"strides": self.strides, "dilations": self.dilations}

    def transposed(self, dy: ir.Value, w: ir.Value, x: ir.Value, group: int) -> ir.Value:
        """The transposed convolution of dy, of exactly x's size."""
        sizes, counts = spatial(x), spatial(dy)
        begin = [low for low, _ in self.pads]
        steps = {**self.steps(), "group": group}
        whole: ir.Value
        if all(s == 1 for s in self.strides):  # nothing that a stride might have passed over
            whole = self.op.ConvTranspose(dy, w, pads=self.flat_pads(), **steps)
            return whole
        if self.kernel is not None and sizes is not None and counts is not None:
            surplus = [
                (n - 1) * s + (k - 1) * d + 1 - low - size
                for n, s, k, d, low, size in zip(
                    counts, self.strides, self.kernel, self.dilations, begin, sizes, strict=True
                )
            ]
            pads = begin + [max(s, 0) for s in surplus]
            extra = [max(-s, 0) for s in surplus]
            whole = self.op.ConvTranspose(dy, w, pads=pads, output_padding=extra, **steps)
            return whole
        # As long as any input could have been, then cut to this one's size.
        wide = self.op.ConvTranspose(
            dy, w, pads=begin + [0] * self.rank, output_padding=[s - 1 for s in self.strides],
            **steps,
        )  # fmt: skip
        self._ranked(wide)
        axes = list(range(2, 2 + self.rank))
        whole = self.op.Slice(wide, [0] * self.rank, self.sizes(x), axes)
        return whole

    def bias_gradient(self, dy: ir.Value) -> ir.Value:
        """The sum of dy for each channel."""
        total: ir.Value = self.op.ReduceSum(dy, [0, *range(2, 2 + self.rank)], keepdims=0)
        return total

    def sizes(self, value: ir.Value) -> ir.Value:
        """The spatial sizes as an int64 tensor."""
        known = spatial(value)
        if known is not None:
            return self.op.constant(np.array(known, np.int64))
        shape: ir.Value = self.op.Shape(value, start=2)
        return shape

    def weight_gradient(self, image: ir.Value, dy: ir.Value, w: ir.Value, group: int) -> ir.Value:
        """dw[m, c, tap] = sum over batch and positions of dy[n, m, p] * image[n, c, p * s + tap]"""
        kernel, dims = self.kernel, shapes.dims(w)
        if kernel is None or math.prod(kernel) > MOST_TAPS:
            return self._swapped(image, dy, w, group)
        outer, inner = dims[:2] if dims is not None else (None, None)
        if group > 1 and inner == 1 and outer == group:
            return self._depthwise(image, dy, w)
        if group > 1:
            if isinstance(outer, int) and isinstance(inner, int):
                return self._grouped(image, dy, w, group, outer, inner)
            return self._swapped(image, dy, w, group)
        apart = all(k == s for k, s in zip(kernel, self.strides, strict=True)) and max(kernel) > 1
        few = isinstance(inner, int) and inner <= 4 and max(kernel) >= 5
        return self._swapped(image, dy, w, 1) if apart or few else self._taps(image, dy)

    def _taps(self, image: ir.Value, dy: ir.Value) -> ir.Value:
        """Channels last: [positions, taps * channels], by one matrix product with dy."""
        op, rank = self.op, self.rank
        last = [0, *range(2, 2 + rank), 1]
        slices = self._slices(op.Transpose(self._padded(image), perm=last), dy, first=1)
        columns = slices[0] if len(slices) == 1 else op.Concat(*slices, axis=-1)
        columns = self._rows(columns, image, len(slices))
        rows = op.Reshape(op.Transpose(dy, perm=[1, 0, *range(2, 2 + rank)]), [0, -1])
        product = op.Reshape(op.MatMul(rows, columns), [0, *(self.kernel or []), -1])
        dw: ir.Value = op.Transpose(product, perm=[0, 1 + rank, *range(1, 1 + rank)])
        return dw

    def _rows(self, columns: ir.Value, image: ir.Value, taps: int) -> ir.Value:
        channels = (shapes.dims(image) or (None, None))[1]
        rows: ir.Value
        if isinstance(channels, int):
            rows = self.op.Reshape(columns, [-1, taps * channels])
        else:
            width = self.op.dim(image, 1) * taps
            rows = self.op.Reshape(columns, self.op.Concat([-1], width, axis=0))
        return rows

    def _depthwise(self, image: ir.Value, dy: ir.Value, w: ir.Value) -> ir.Value:
        """Channels last: for each tap the sum of slice * dy."""
        op, rank = self.op, self.rank
        last = [0, *range(2, 2 + rank), 1]
        slices = self._slices(op.Transpose(self._padded(image), perm=last), dy, first=1)
        dy, axes = op.Transpose(dy, perm=last), list(range(1 + rank))
        sums = [op.Unsqueeze(op.ReduceSum(s * dy, axes, keepdims=0), [1]) for s in slices]
        dw: ir.Value = op.Reshape(op.Concat(*sums, axis=1), op.shape(w))
        return dw

    def _grouped(
        self, image: ir.Value, dy: ir.Value, w: ir.Value, group: int, outer: int, inner: int
    ) -> ir.Value:
        """For each image and group a matrix product of dy and the taps, then a sum over images."""
        op = self.op
        slices = self._slices(self._padded(image), dy, first=2)
        taps = op.Concat(*(op.Unsqueeze(s, [2]) for s in slices), axis=2)
        columns = op.Reshape(taps, [0, group, inner * len(slices), -1])
        rows = op.Reshape(dy, [0, group, outer // group, -1])
        product = op.MatMul(rows, op.Transpose(columns, perm=[0, 1, 3, 2]))
        dw: ir.Value = op.Reshape(op.ReduceSum(product, [0], keepdims=0), op.shape(w))
        return dw

    def _swapped(self, image: ir.Value, dy: ir.Value, w: ir.Value, group: int) -> ir.Value:
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
            self._ranked(batch)
        full = op.Conv(
            batch, op.Transpose(dy, perm=swap), group=group, pads=self.flat_pads(),
            strides=self.dilations, dilations=self.strides,
        )  # fmt: skip
        self._ranked(full)
        if any(s != 1 for s in self.strides):  # positions that a stride passed over
            axes = list(range(2, 2 + rank))
            size = self.kernel if self.kernel is not None else self.sizes(w)
            full = op.Slice(full, [0] * rank, size, axes)
        dw: ir.Value = op.Transpose(full, perm=swap)
        return dw

    def _ranked(self, image: ir.Value) -> None:
        """Says how many axes images have of which no sizes are known: their gradients ask."""
        if image.shape is None:
            image.shape = ir.Shape([None] * (2 + self.rank))

    def _padded(self, image: ir.Value) -> ir.Value:
        if not any(self.flat_pads()):
            return image
        flat = self.flat_pads()
        around = [0, 0, *flat[: self.rank], 0, 0, *flat[self.rank :]]
        padded: ir.Value = self.op.Pad(image, around, 0)
        self._ranked(padded)
        return padded

    def _slices(self, padded: ir.Value, dy: ir.Value, first: int) -> list[ir.Value]:
        """What each tap of the kernel sees: a strided slice each, the spatial axes from `first`."""
        kernel = self.kernel or []
        if all(k == 1 for k in kernel) and all(s == 1 for s in self.strides):
            return [padded]
        axes = list(range(first, first + self.rank))
        strides, dilations = np.array(self.strides), np.array(self.dilations)
        counts = spatial(dy)
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


def spatial(value: ir.Value) -> list[int] | None:
    """The spatial sizes, None where one of them is unknown."""
    known = shapes.dims(value)
    return None if known is None else numbers(known[2:])


def numbers(dims: Sequence[shapes.Dim]) -> list[int] | None:
    """The dimensions as a list, None where one of them is unknown."""
    known = [d for d in dims if isinstance(d, int)]
    return known if len(known) == len(dims) else None

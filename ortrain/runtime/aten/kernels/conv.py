"""Convolutions."""

from __future__ import annotations

import math

import numpy as np

from ortrain.runtime.aten.kernels.create import DEVICE
from ortrain.runtime.aten.kernels.pad import padded
from ortrain.runtime.aten.kernels.shape import shaped, sized, viewed
from ortrain.runtime.aten.operands import Size, product
from ortrain.runtime.aten.table import kernel


@kernel("Conv")
def conv(
    t, x, w, b=None, *, auto_pad="NOTSET", dilations=None, group=1, kernel_shape=None, pads=None,
    strides=None, node,
):  # fmt: skip
    rank = _rank(t, x, w, node)
    kernel_shape = kernel_shape or w.shape[2:]
    window = Window(t, x, kernel_shape, strides, dilations, auto_pad, pads)
    dims = [x.dims[0], w.dims[0], *window.counts(x)]
    x, pads = window.around(x)
    steps = (window.strides, pads, window.dilations, group)
    owner = "convolutions" if node.inputs[0] in t.images else "torch"
    return sized(t.call(f"{owner}.conv{rank}d", x, w, b, *steps), dims)


def _rank(t, x, w, node):
    """The number of spatial axes; where it is not known of the image, the weight tells."""
    if x.dims is None:
        x.dims = (None,) * w.rank
    if not 1 <= w.rank - 2 <= 3:
        raise t.refusal(node, f"PyTorch has no convolution over {w.rank - 2} axes")
    return w.rank - 2


class Window:
    """How a window moves over an image: kernel, strides, dilations and pads, spelled out.

    Attributes:
        pads: (begin, end) of each spatial axis.
    """

    def __init__(self, t, x, kernel, strides, dilations, auto_pad, pads, grows=True):
        self.t, self.kernel, self.rank = t, list(kernel), len(kernel)
        self.strides, self.dilations = strides or [1] * self.rank, dilations or [1] * self.rank
        flat = list(pads or [0] * (2 * self.rank))
        self.pads = [*zip(flat[: self.rank], flat[self.rank :], strict=True)]
        if auto_pad == "VALID":
            self.pads = [(0, 0)] * self.rank
        elif grows and auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            self.pads = [self._same(x, i, auto_pad) for i in range(self.rank)]

    def spans(self):
        """How far the window reaches along each axis."""
        pairs = zip(self.kernel, self.dilations, strict=True)
        return [(k - 1) * d + 1 for k, d in pairs]

    def _same(self, x, i, auto_pad):
        """The pads with which the output has the input's size, divided by the stride."""
        stride, span, size = self.strides[i], self.spans()[i], x.dims[2 + i]
        if stride == 1:
            total = span - 1
        elif isinstance(size, int) and isinstance(span, int):
            total = max(0, (-(-size // stride) - 1) * stride + span - size)
        else:
            size = x.size(2 + i)
            total = Size(f"max(0, (-(-{size} // {stride}) - 1) * {stride} + {span} - {size})")
        small, large = split_in_two(self.t, total)
        return (small, large) if auto_pad == "SAME_UPPER" else (large, small)

    def counts(self, x, pads=None):
        """How many windows there are along each axis, where that is known."""
        rows = zip(x.dims[2:], pads or self.pads, self.spans(), self.strides, strict=True)
        return [
            (size + low + high - span) // stride + 1
            if all(isinstance(n, int) for n in (size, low, high, span))
            else None
            for size, (low, high), span, stride in rows
        ]

    def around(self, x, fill=0):
        """The image with the pads that PyTorch does not take, and those that it takes."""
        both = [low if low == high else 0 for low, high in self.pads]
        rest = [(low - n, high - n) for (low, high), n in zip(self.pads, both, strict=True)]
        return padded(self.t, x, [(0, 0), (0, 0), *rest], fill), both


def split_in_two(t, total):
    """A number as two, of which the second is larger where it is odd."""
    if isinstance(total, int):
        return total // 2, total - total // 2
    total = t.bound(total)
    small = Size(f"({total} // 2)")
    return small, total - small


@kernel("ConvTranspose")
def conv_transpose(
    t, x, w, b=None, *, auto_pad="NOTSET", dilations=None, group=1, kernel_shape=None,
    output_padding=None, output_shape=None, pads=None, strides=None, node,
):  # fmt: skip
    """PyTorch leaves out as much at both ends; what else is too much is cut off afterwards.

    What is wanted beyond the reach of the windows is the bias alone.
    """
    rank = _rank(t, x, w, node)
    window = Window(t, x, kernel_shape or w.shape[2:], strides, dilations, auto_pad, pads, False)
    extra = [*(output_padding or [0] * rank)]
    if output_shape or auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        window.pads, extra = _implied_pads(t, x, window, extra, output_shape, auto_pad)
    both, longer, behind, places = [], [], [], [":", ":"]
    rows = zip(window.pads, extra, window.strides, window.dilations, strict=True)
    for (low, high), more, stride, dilation in rows:
        most = max(stride, dilation) - 1  # by which PyTorch makes a result longer
        taken, end = 0, more
        if all(isinstance(n, int) for n in (low, high, more)):
            # Of [taken, full - taken + longer) there stays [low, full + more - high).
            taken = max(0, min(low, most + high - more))
            end, low, high = taken + more - high, low - taken, 0
            end, high = max(end, 0), max(-end, 0)
            places.append(f"{low or ''}:{-high or ''}")
        else:
            places.append(f"{low}:-{high} or None")
        both.append(taken)
        longer.append(min(end, most) if isinstance(end, int) else 0)
        behind.append((0, end - longer[-1]))
    reaches = all(pair == (0, 0) for pair in behind)
    steps = (window.strides, both, longer, group, window.dilations)
    y = t.call(f"torch.conv_transpose{rank}d", x, w, b if reaches else None, *steps)
    dims = [x.dims[0], w.dims[1] * group if isinstance(w.dims[1], int) else None]
    axes = zip(x.dims[2:], window.strides, window.spans(), extra, window.pads, strict=True)
    for size, stride, span, more, (low, high) in axes:
        known = all(isinstance(n, int) for n in (size, span, more, low, high))
        dims.append((size - 1) * stride + span + more - low - high if known else None)
    if not reaches:
        y = padded(t, sized(y, [None] * x.rank), [(0, 0), (0, 0), *behind])
        y = y if b is None else t.add(y, b.reshape(-1, *[1] * rank))
    return sized(viewed(t, y, places), dims)


def _implied_pads(t, x, window, extra, output_shape, auto_pad):
    """The pads that give a transposed convolution its output's size.

    Returns:
        (begin, end) of each axis, and how much longer it is to be beforehand: where the windows do
        not reach as far as ``output_shape``, by the difference, too. Without one the output ends
        where they do, as onnxruntime and ONNX's own inference of shapes have it.
    """
    pads, longer = [], []
    rows = zip(window.strides, window.spans(), extra, strict=True)
    for i, (stride, span, more) in enumerate(rows):
        total = span + more - stride  # for an output as large as the input, times the stride
        if output_shape:
            total = (x.size(2 + i) - 1) * stride + span + more - output_shape[i]
        if isinstance(total, int):
            missing, total = max(-total, 0), max(total, 0)
        else:
            total = t.bound(total)
            missing, total = Size(f"max(-{total}, 0)"), Size(f"max({total}, 0)")
        small, large = split_in_two(t, total)
        pads.append((small, large) if auto_pad == "SAME_UPPER" else (large, small))
        longer.append(more + missing if output_shape else more)
    return pads, longer


@kernel("Col2Im")
def col2im(t, input, image_shape, block_shape, *, dilations=None, pads=None, strides=None, node):
    image, block = t.ints(image_shape), t.ints(block_shape)
    window = Window(t, input, block, strides, dilations, "NOTSET", pads)
    depth, area = input.size(1), product(block)
    known = isinstance(depth, int) and isinstance(area, int)
    lead = [input.size(0), depth // area if known else Size(f"({depth} // {area})")]
    whole = [n + low + high for n, (low, high) in zip(image, window.pads, strict=True)]
    if len(image) != 2:
        y = _put_back(t, input, lead, whole, window, node)
    else:
        is_even = all(low == high for low, high in window.pads)
        both = [low if is_even else 0 for low, _ in window.pads]
        steps = (image if is_even else whole, block, window.dilations, both, window.strides)
        y = sized(t.call("torch._C._nn.col2im", input, *steps), [*lead, *steps[0]])
        if is_even:
            return y
    return padded(t, y, [(0, 0), (0, 0), *((-low, -high) for low, high in window.pads)])


def _put_back(t, input, lead, image, window, node):
    """Any number of axes: each element of a block is added at its place in the flat image."""
    places = np.zeros((1, 1), np.int64)  # [elements of a block, blocks]
    rows = zip(image, window.kernel, window.dilations, window.strides, strict=True)
    for size, kernel_size, dilation, stride in rows:
        if not isinstance(size, int) or not isinstance(kernel_size, int):
            raise t.refusal(node, "PyTorch has it for two axes only, or for known sizes")
        inner = np.arange(kernel_size) * dilation
        outer = np.arange(0, size - inner[-1], stride)
        own = (inner[:, None] + outer)[None, :, None, :]
        places = places[:, None, :, None] * size + own
        places = places.reshape(places.shape[0] * kernel_size, -1)
    zeros = t.zeros([*lead, math.prod(image)], dtype=input.dtype, device=DEVICE)
    flat = t.constant_tensor(places.reshape(-1), "places")
    y = zeros.index_add(2, flat, input.reshape(*lead, places.size))
    return shaped(y, [*lead, *image])

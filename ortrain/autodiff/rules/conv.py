"""Convolutions."""

from __future__ import annotations

from ortrain.autodiff.registry import Gradient, gradient
from ortrain.ops.gradients.conv import numbers


@gradient("Conv")
def conv(
    g, x, w, b=None, *, auto_pad="NOTSET", dilations=None, group=1, kernel_shape=None, pads=None,
    strides=None,
):  # fmt: skip
    """dx = transposed convolution of dy, dw = correlation of x and dy, db = sum of dy"""
    window = spelled(g, x, w, auto_pad, dilations, kernel_shape, pads, strides)
    needs = [g.needs(i) for i in range(3)]
    read = _read(g, x, w, needs)
    return g.composite("ConvGradient", g.dy, *read, group=group, needs=needs, **window)


@gradient("ConvTranspose")
def conv_transpose(
    g, x, w, b=None, *, auto_pad="NOTSET", dilations=None, group=1, kernel_shape=None,
    output_padding=None, output_shape=None, pads=None, strides=None,
):  # fmt: skip
    """dx = convolution of dy, dw = correlation of dy and x, db = sum of dy"""
    window = spelled(g, x, w, "NOTSET", dilations, kernel_shape, pads, strides)
    extra = output_padding or [0] * len(window["strides"])
    if output_shape or auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        window["pads"], extra = _implied_pads(g, window, x, auto_pad, extra)
    if any(e >= s for e, s in zip(extra, window["strides"], strict=True)):
        g.unsupported("its output reaches a stride or more beyond the windows")
    needs = [g.needs(i) for i in range(3)]
    return g.composite(
        "ConvTransposeGradient", g.dy, *_read(g, x, w, needs), output_padding=extra, group=group,
        needs=needs, **window,
    )  # fmt: skip


def _read(g, x, w, needs):
    """Each gradient reads the other operand."""
    return x if needs[1] else g.like(x), w if needs[0] else g.like(w)


def spelled(g: Gradient, x, w, auto_pad, dilations, kernel_shape, pads, strides):
    """How a window moves over an image, as attributes that leave nothing to be concluded."""
    rank = g.rank(x) - 2
    result = {"strides": strides or [1] * rank, "dilations": dilations or [1] * rank}
    result["kernel_shape"] = kernel_shape or numbers(g.dims(w)[2:])
    result["pads"] = list(pads or [0] * (2 * rank))
    if auto_pad == "VALID":
        result["pads"] = [0] * (2 * rank)
    elif auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        result["pads"] = _flat([_same(g, x, i, auto_pad, result) for i in range(rank)])
    return result


def _same(g: Gradient, x, i, auto_pad, window):
    """The pads with which the output has the input's size, divided by the stride."""
    stride, size, kernel = window["strides"][i], g.dims(x)[2 + i], window["kernel_shape"]
    if kernel is None or (stride != 1 and not isinstance(size, int)):
        g.unsupported("auto_pad over sizes that are known at run time only")
    reach = (kernel[i] - 1) * window["dilations"][i]
    total = reach
    if stride != 1:
        total = max(0, (-(-size // stride) - 1) * stride + reach + 1 - size)
    small, large = total // 2, total - total // 2
    return (small, large) if auto_pad == "SAME_UPPER" else (large, small)


def _implied_pads(g: Gradient, window, x, auto_pad, extra):
    """The pads that give a transposed convolution its output's size, and its output padding.

    The output is longer than the windows reach only where ``output_shape`` says so.
    """
    sizes, wanted = numbers(g.dims(x)[2:]), numbers(g.dims(g.y)[2:])
    kernel, strides, dilations = window["kernel_shape"], window["strides"], window["dilations"]
    if sizes is None or wanted is None or kernel is None:
        g.unsupported("its pads follow from sizes that are known at run time only")
    result, longer = [], []
    rows = zip(sizes, wanted, kernel, strides, dilations, extra, strict=True)
    for size, want, k, stride, dilation, more in rows:
        surplus = (size - 1) * stride + (k - 1) * dilation + 1 + more - want
        total = max(0, surplus)
        small, large = total // 2, total - total // 2
        result.append((small, large) if auto_pad == "SAME_UPPER" else (large, small))
        longer.append(more + max(0, -surplus))
    return _flat(result), longer


def _flat(pairs):
    """The begins, then the ends."""
    return [begin for begin, _ in pairs] + [end for _, end in pairs]

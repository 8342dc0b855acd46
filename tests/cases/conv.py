"""Convolutions."""

from __future__ import annotations

from torch.nn import functional as F  # noqa: N812

from ortrain.testing import OpCase, normal

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def padded(x, pads):
    rank = x.ndim - 2
    return F.pad(x, [p for i in reversed(range(rank)) for p in (pads[i], pads[rank + i])])


def convolve(x, w, b=None, dilations=None, group=1, pads=None, strides=None):
    rank = x.ndim - 2
    x = padded(x, pads or [0] * (2 * rank))
    return CONV[rank](x, w, b, strides or 1, 0, dilations or 1, group)


def transpose(x, w, b=None, dilations=None, group=1, pads=None, strides=None, output_padding=0):
    rank = x.ndim - 2
    pads = pads or [0] * (2 * rank)
    assert pads[:rank] == pads[rank:]
    return TRANSPOSED[rank](
        x, w, b, strides or 1, pads[:rank], output_padding, group, dilations or 1
    )


def case(operator, note, x, w, bias=True, torch=None, unsupported="", symbolic=True, **attributes):
    channels = w[0] if operator == "Conv" else w[1] * attributes.get("group", 1)
    inputs = {"x": normal(*x), "w": normal(*w), **({"b": normal(channels)} if bias else {})}
    attributes.setdefault("kernel_shape", list(w[2:]))
    if attributes["kernel_shape"] is None:
        del attributes["kernel_shape"]
    return OpCase(
        operator, inputs, attributes, torch=torch, tolerance="sums", note=note,
        unsupported=unsupported, symbolic=symbolic, batch=True,
    )  # fmt: skip


def conv(note, x, w, **options):
    return case("Conv", note, x, w, **{"torch": convolve, **options})


def transposed(note, x, w, **options):
    return case("ConvTranspose", note, x, w, **{"torch": transpose, **options})


def same(mode):
    """auto_pad, spelled out for PyTorch: the odd one goes to the end (upper) or begin (lower)."""

    def apply(x, w, b=None, strides=None):
        pads = []
        for size, k, s in zip(x.shape[2:], w.shape[2:], strides or [1, 1], strict=True):
            total = max(0, (-(-size // s) - 1) * s + k - size)
            pads.append((total // 2, total - total // 2))
        if mode == "lower":
            pads = [(high, low) for low, high in pads]
        flat = [low for low, _ in pads] + [high for _, high in pads]
        return convolve(x, w, b, pads=flat, strides=strides)

    return apply


SIZES = "known at run time only"

CASES = [
    conv("3x3", (2, 5, 5, 6), (3, 5, 3, 3), pads=[1, 1, 1, 1]),
    conv("no-kernel-shape", (2, 5, 5, 6), (3, 5, 3, 3), kernel_shape=None),
    conv("no-bias", (2, 5, 5, 6), (3, 5, 2, 3), bias=False),
    conv("1x1", (2, 5, 3, 4), (3, 5, 1, 1)),
    conv("1x1-stride", (2, 5, 5, 4), (3, 5, 1, 1), strides=[2, 2]),
    conv("uneven-pads", (1, 5, 5, 4), (2, 5, 3, 3), pads=[0, 2, 1, 0]),
    conv("stride", (2, 5, 7, 6), (3, 5, 3, 3), strides=[2, 2], pads=[1, 1, 1, 1]),
    conv("stride-passes-over", (1, 5, 8, 9), (2, 5, 2, 2), strides=[3, 4]),
    conv("uneven-stride", (1, 5, 7, 8), (2, 5, 3, 2), strides=[1, 3]),
    conv("dilation", (1, 5, 7, 8), (2, 5, 3, 2), dilations=[2, 3], pads=[2, 0, 1, 1]),
    conv("dilation-stride", (1, 5, 9, 8), (2, 5, 3, 2), dilations=[2, 1], strides=[2, 2]),
    conv("stem", (1, 3, 12, 11), (2, 3, 5, 5), strides=[2, 2], pads=[2, 2, 2, 2]),
    conv("patches", (2, 5, 8, 8), (3, 5, 4, 4), strides=[4, 4]),
    conv("patches-cut", (1, 5, 9, 11), (3, 5, 4, 4), strides=[4, 4]),
    conv("groups", (2, 6, 5, 4), (4, 3, 3, 3), group=2, pads=[1, 1, 1, 1]),
    conv("groups-stride", (2, 4, 6, 5), (6, 2, 3, 2), group=2, strides=[2, 2]),
    conv("depthwise", (2, 4, 5, 4), (4, 1, 3, 3), group=4, pads=[1, 1, 1, 1]),
    conv("depthwise-stride", (2, 4, 7, 6), (4, 1, 3, 3), group=4, strides=[2, 2]),
    conv("depthwise-twice", (2, 3, 5, 4), (6, 1, 3, 3), group=3),
    conv("large-kernel", (1, 2, 10, 9), (2, 2, 9, 8)),
    conv("large-kernel-groups", (2, 4, 10, 9), (4, 2, 9, 8), group=2, strides=[1, 2],
         pads=[0, 1, 0, 1]),
    conv("auto-pad-valid", (1, 5, 5, 4), (2, 5, 3, 3), auto_pad="VALID"),
    conv("auto-pad-upper", (1, 5, 5, 4), (2, 5, 2, 3), auto_pad="SAME_UPPER", torch=same("upper")),
    conv("auto-pad-lower", (1, 5, 5, 4), (2, 5, 2, 4), auto_pad="SAME_LOWER", torch=same("lower")),
    conv("auto-pad-stride", (1, 5, 7, 6), (2, 5, 4, 3), auto_pad="SAME_UPPER", strides=[2, 2],
         torch=same("upper"), unsupported=SIZES),
    conv("1d", (2, 5, 9), (3, 5, 3), pads=[1, 1]),
    conv("1d-stride", (2, 5, 10), (3, 5, 4), strides=[3]),
    conv("1d-depthwise", (2, 3, 9), (3, 1, 4), group=3, pads=[3, 0]),
    conv("1d-groups", (2, 4, 9), (6, 2, 3), group=2, strides=[2]),
    conv("3d", (1, 5, 4, 3, 5), (2, 5, 2, 3, 2), pads=[1, 0, 1, 0, 1, 0], strides=[2, 1, 2]),
    conv("one-output", (1, 5, 3, 3), (2, 5, 3, 3)),
    transposed("plain", (2, 3, 4, 3), (3, 2, 3, 2)),
    transposed("no-bias", (2, 3, 4, 3), (3, 2, 2, 2), bias=False, strides=[2, 2]),
    transposed("stride", (2, 3, 4, 3), (3, 2, 3, 3), strides=[2, 2], pads=[1, 1, 1, 1]),
    transposed("output-padding", (1, 3, 4, 3), (3, 2, 3, 3), strides=[2, 3],
               pads=[1, 1, 1, 1], output_padding=[1, 2]),
    transposed("groups", (2, 4, 3, 3), (4, 3, 3, 2), group=2, strides=[2, 1]),
    transposed("depthwise", (2, 4, 3, 3), (4, 1, 3, 2), group=4, strides=[2, 1]),
    transposed("dilation", (1, 5, 3, 4), (5, 2, 2, 3), dilations=[3, 2], pads=[1, 2, 1, 2]),
    transposed("1d", (2, 3, 5), (3, 2, 4), strides=[2], pads=[1, 1]),
    transposed("output-shape", (1, 3, 4, 4), (3, 2, 3, 3), strides=[2, 2], output_shape=[8, 8],
               torch=None, unsupported=SIZES),
    transposed("output-shape-beyond", (1, 3, 3, 2), (3, 2, 3, 2), strides=[3, 2],
               output_shape=[10, 5], torch=None, unsupported=SIZES),
    transposed("auto-pad-beyond", (1, 3, 3, 2), (3, 2, 1, 2), strides=[2, 3],
               auto_pad="SAME_LOWER", torch=None, unsupported=SIZES),
    transposed("auto-pad", (1, 3, 4, 4), (3, 2, 3, 3), strides=[2, 2], auto_pad="SAME_UPPER",
               torch=None, unsupported=SIZES),
]  # fmt: skip

"""Pooling."""

from __future__ import annotations

import numpy as np
from torch.nn import functional as F  # noqa: N812

from ortrain.testing import OpCase, distinct, normal
from tests.cases.conv import padded

MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def max_pool(x, kernel_shape, strides=None, pads=None, dilations=None, ceil_mode=0):
    rank = len(kernel_shape)
    pads = pads or [0] * (2 * rank)
    if pads[:rank] != pads[rank:]:
        low = F.pad(
            x, [p for i in reversed(range(rank)) for p in (pads[i], pads[rank + i])], value=-np.inf
        )
        x, pads = low, [0] * rank
    return MAX[rank](x, kernel_shape, strides or 1, pads[:rank], dilations or 1, bool(ceil_mode))


def average_pool(x, kernel_shape, strides=None, pads=None, ceil_mode=0, count_include_pad=0):
    rank = len(kernel_shape)
    pads = pads or [0] * (2 * rank)
    if pads[:rank] != pads[rank:]:
        assert count_include_pad
        x, pads = padded(x, pads), [0] * rank
    return AVERAGE[rank](
        x, kernel_shape, strides or 1, pads[:rank], bool(ceil_mode), bool(count_include_pad)
    )


OPTIONS = {"torch", "unsupported", "opsets", "outputs", "runtime", "symbolic"}


def pool(operator, note, shape, window, draw, /, **others):
    options = {k: v for k, v in others.items() if k in OPTIONS}
    attributes = {k: v for k, v in others.items() if k not in OPTIONS}
    return OpCase(
        operator, {"x": draw(*shape)}, {"kernel_shape": window, **attributes}, note=note,
        tolerance="sums", batch=True, **{"torch": None, **options},
    )  # fmt: skip


def maximum(note, shape, window, draw=distinct, **others):
    return pool("MaxPool", note, shape, window, draw, **{"torch": max_pool, **others})


def average(note, shape, window, **others):
    return pool("AveragePool", note, shape, window, normal, **{"torch": average_pool, **others})


def tied(*shape):
    return np.zeros(shape, np.float32)


CASES = [
    maximum("2x2", (2, 3, 4, 6), [2, 2], strides=[2, 2]),
    maximum("2x3", (1, 2, 4, 6), [2, 3], strides=[2, 3]),
    maximum("tiles-1d", (2, 3, 6), [3], strides=[3]),
    maximum("tiles-3d", (1, 2, 2, 4, 2), [2, 2, 1], strides=[2, 2, 1]),
    maximum("window-of-one", (1, 2, 3, 3), [1, 1]),
    maximum("tiles-of-many", (1, 2, 6, 10), [6, 5], strides=[6, 5]),
    maximum("remainder", (1, 2, 5, 7), [2, 2], strides=[2, 2]),
    maximum("overlapping", (2, 2, 5, 5), [3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    maximum("stride-1", (1, 2, 4, 4), [2, 3]),
    maximum("uneven-pads", (1, 2, 4, 4), [3, 3], strides=[2, 2], pads=[0, 1, 1, 0]),
    maximum("dilation", (1, 2, 6, 6), [2, 2], dilations=[2, 3]),
    maximum("apart", (1, 2, 6, 6), [2, 2], strides=[3, 3]),
    maximum("ceil", (1, 2, 5, 5), [2, 2], strides=[2, 2], ceil_mode=1),
    maximum("overlapping-1d", (2, 2, 7), [3], strides=[2], pads=[1, 1]),
    maximum("overlapping-3d", (1, 1, 4, 3, 3), [3, 2, 2], strides=[2, 1, 1], pads=[1, 0, 0] * 2),
    maximum("auto-pad", (1, 2, 5, 5), [3, 3], strides=[1, 1], auto_pad="SAME_UPPER",
            torch=lambda x: F.max_pool2d(x, 3, 1, 1)),
    average("2x2", (2, 3, 4, 6), [2, 2], strides=[2, 2]),
    average("remainder", (1, 2, 5, 7), [2, 2], strides=[2, 2]),
    average("overlapping", (2, 2, 5, 5), [3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    average("overlapping-include-pad", (2, 2, 5, 5), [3, 3], strides=[2, 2], pads=[1, 1, 1, 1],
            count_include_pad=1),
    average("uneven-pads", (1, 2, 4, 4), [3, 3], strides=[2, 2], pads=[0, 1, 1, 0],
            count_include_pad=1),
    average("stride-1", (1, 2, 4, 4), [2, 3]),
    average("ceil", (1, 2, 6, 6), [3, 3], strides=[2, 2], ceil_mode=1,
            unsupported="known at run time only"),
    average("ceil-pads", (1, 2, 6, 6), [3, 3], strides=[2, 2], ceil_mode=1, pads=[1, 1, 1, 1],
            unsupported="known at run time only"),
    average("ceil-include-pad", (1, 2, 6, 6), [3, 3], strides=[2, 2], ceil_mode=1,
            pads=[1, 1, 1, 1], count_include_pad=1, unsupported="known at run time only",
            opsets=(21,)),
    average("dilation", (1, 2, 6, 6), [2, 2], dilations=[2, 3], opsets=(19, 21), torch=None),
    average("1d", (2, 2, 7), [3], strides=[2], pads=[1, 1]),
    average("3d", (1, 2, 4, 3, 3), [2, 2, 1], strides=[2, 1, 1]),
    average("one-channel", (2, 1, 4, 4), [2, 2], strides=[2, 2]),
    average("larger-than-padded", (2, 2, 3, 2), [5, 4], strides=[2, 3], pads=[1, 1, 1, 1]),
    average("larger-include-pad", (2, 2, 3, 2), [5, 4], strides=[2, 3], pads=[1, 1, 1, 1],
            count_include_pad=1),
    average("auto-pad", (1, 2, 5, 5), [3, 3], auto_pad="SAME_LOWER",
            torch=lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)),
    OpCase("GlobalAveragePool", {"x": normal(2, 3, 4, 2)}, tolerance="sums",
           torch=lambda x: F.adaptive_avg_pool2d(x, 1)),
    OpCase("GlobalAveragePool", {"x": normal(2, 3, 4)}, tolerance="sums", note="1d",
           torch=lambda x: F.adaptive_avg_pool1d(x, 1)),
    OpCase("GlobalMaxPool", {"x": distinct(2, 3, 4, 2)}, tolerance="sums",
           torch=lambda x: F.adaptive_max_pool2d(x, 1)),
    *(
        OpCase("Col2Im",
               {"x": normal(2, 8, count), "image": np.array([4, 5]), "block": np.array([2, 2])},
               options, constants=("image", "block"), tolerance="sums", note=note, symbolic=False,
               torch=lambda x, image, block, fold=fold: F.fold(x, (4, 5), 2, **fold))
        for note, count, options, fold in (
            ("plain", 12, {}, {}),
            ("strided", 9, {"strides": [2, 2], "pads": [1, 1, 1, 1]}, {"stride": 2, "padding": 1}),
            ("dilated", 6, {"dilations": [2, 2]}, {"dilation": 2}),
        )
    ),
    OpCase("MaxUnpool",
           {"x": normal(1, 2, 2, 2), "indices": np.array([0, 3, 9, 14, 17, 19, 27, 30])
            .reshape(1, 2, 2, 2)},
           {"kernel_shape": [2, 2], "strides": [2, 2]},
           torch=lambda x, indices: F.max_unpool2d(x, indices % 16, 2)),
]  # fmt: skip

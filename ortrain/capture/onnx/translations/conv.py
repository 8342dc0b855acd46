"""Convolution, and the windows that one looks through."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ortrain.capture.onnx.translations.base import Translator, aten, translation
from ortrain.graph import shapes

_SPATIAL = {
    aten.conv1d.default: 1,
    aten.conv2d.default: 2,
    aten.conv3d.default: 3,
    aten.conv1d.padding: 1,
    aten.conv2d.padding: 2,
    aten.conv3d.padding: 3,
}


@translation(*_SPATIAL)
def convolution(
    op: Translator,
    input: ir.Value,
    weight: ir.Value,
    bias: ir.Value | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> ir.Value:
    known = shapes.static(weight)
    assert known is not None
    kernel = known[2:]
    count = len(kernel)
    dilations = spread(dilation, count)
    if shapes.rank(input) == count + 1:  # without a batch axis
        single = convolution(
            op, op.Unsqueeze(input, [0]), weight, bias, stride, padding, dilation, groups
        )
        return op.Squeeze(single, [0])
    if isinstance(padding, str):
        total = [
            d * (k - 1) if padding == "same" else 0 for d, k in zip(dilations, kernel, strict=True)
        ]
        pads = [t // 2 for t in total] + [t - t // 2 for t in total]
    else:
        pads = spread(padding, count) * 2
    return op.Conv(
        input,
        weight,
        bias,
        kernel_shape=kernel,
        strides=spread(stride, count),
        pads=pads,
        dilations=dilations,
        group=groups,
    )


def spread(value: int | Sequence[int], count: int) -> list[int]:
    """One number for each spatial axis."""
    if isinstance(value, int):
        return [value] * count
    return list(value) * count if len(value) == 1 else list(value)


@translation(aten.im2col.default)
def im2col(
    op: Translator,
    self: ir.Value,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> ir.Value:
    """[N, C, H, W] → [N, C * window, windows], with or without the batch."""
    if shapes.rank(self) == 3:
        single = im2col(op, op.Unsqueeze(self, [0]), kernel_size, dilation, padding, stride)
        return op.Squeeze(single, [0])
    padded = op.Pad(self, [0, 0, *padding] * 2) if any(padding) else self
    windows = padded
    for i in range(2):
        taps = np.arange(kernel_size[i], dtype=np.int64) * dilation[i]
        last = op.Sub(op.Squeeze(op.dim(padded, i + 2), [0]), int(taps[-1]))
        firsts = op.Range(np.int64(0), last, np.int64(stride[i]))
        places = op.Add(op.constant(taps[:, None]), firsts)  # [tap, window]
        windows = op.Gather(windows, places, axis=2 + 2 * i)
    # [N, C, tap, window, tap, window]
    ordered = op.Transpose(windows, perm=[0, 1, 2, 4, 3, 5])
    rows = op.Mul(op.dim(self, 1), kernel_size[0] * kernel_size[1])
    return op.Reshape(ordered, op.Concat(op.dim(self, 0), rows, [-1], axis=0))

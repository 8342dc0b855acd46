"""Convolution."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ortrain.capture.translations.base import Translator, aten, translation
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

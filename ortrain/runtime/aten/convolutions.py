"""Convolutions of images whose channels lie last, with more numbers in the weight than in images.

The weight lies with its channels first, and oneDNN brings it, and its gradient, into the order of
the images: of 512 channels and 3 x 3 that are 9 MiB each, twice what a step takes else. Small
images are brought into the order of the weight instead. Forward and backward of 8 x 512 x 4 x 4
then take 5.8 and 20 ms, else 9.4 and 27; of 32 images 13 and 41, else 16 and 44 (a core of a Zen 5,
float32). With 16 x 512 x 7 x 7 both orders take as long. That of the weight needs 18 MiB less.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor

# Images are small where the weight has so many times as many numbers.
MORE = 2
_LAST = torch.channels_last
_backward = torch.ops.aten.convolution_backward.default


def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, strides: Sequence[int], pads: Sequence[int],
    dilations: Sequence[int], group: int,
) -> Tensor:  # fmt: skip
    """As ``torch.conv2d``.

    Args:
        x: [N, C, H, W].
        weight: [K, C / group, h, w].
        bias: [K], or None.
        strides: of the windows.
        pads: at both ends of each axis.
        dilations: of the windows.
        group: of the channels.

    Returns:
        [N, K, ...], whose channels lie last.
    """
    if weight.numel() <= MORE * x.numel():
        return torch.conv2d(x, weight, bias, strides, pads, dilations, group)
    found = torch.conv2d(x.contiguous(), weight, bias, strides, pads, dilations, group)
    return found.contiguous(memory_format=_LAST)


def convolution_backward(
    dy: Tensor, x: Tensor, weight: Tensor, biases: Sequence[int] | None, strides: Sequence[int],
    pads: Sequence[int], dilations: Sequence[int], transposed: bool, output_pads: Sequence[int],
    group: int, asked: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """As ``aten.convolution_backward``; the gradient of ``x`` has its channels last."""
    rest = (biases, strides, pads, dilations, transposed, output_pads, group, asked)
    if weight.numel() <= MORE * (x.numel() + dy.numel()):
        found: tuple[Tensor | None, ...] = _backward(dy, x, weight, *rest)
        return found
    dx, *others = _backward(dy.contiguous(), x.contiguous(), weight, *rest)
    return None if dx is None else dx.contiguous(memory_format=_LAST), *others

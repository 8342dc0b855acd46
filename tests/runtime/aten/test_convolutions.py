"""Convolutions of images whose channels lie last, whichever order they are computed in."""

from __future__ import annotations

import pytest
import torch

from ortrain.runtime.aten import convolutions

LAST = torch.channels_last
# Images, weight, and how windows move: of small images the weight's order is taken.
SIZES = {
    "small images": ((2, 32, 4, 4), (48, 32, 3, 3), 1, 1),
    "a window of one": ((2, 64, 2, 2), (96, 64, 1, 1), 1, 1),
    "groups": ((1, 64, 3, 3), (64, 16, 3, 3), 1, 4),
    "steps of two": ((2, 32, 4, 4), (48, 32, 3, 3), 2, 1),
    "large images": ((2, 8, 30, 30), (12, 8, 3, 3), 1, 1),
}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("case", SIZES)
def test_a_convolution_is_that_of_pytorch(case: str, biased: bool) -> None:
    sizes, weights, stride, group = SIZES[case]
    x, weight = torch.randn(sizes), torch.randn(weights)
    bias = torch.randn(weights[0]) if biased else None
    rest = ([stride] * 2, [1, 1], [1, 1], group)
    found = convolutions.conv2d(x.contiguous(memory_format=LAST), weight, bias, *rest)
    assert found.is_contiguous(memory_format=LAST)
    torch.testing.assert_close(found, torch.conv2d(x, weight, bias, *rest), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("asked", [(True, True, True), (False, True, False), (True, False, False)])
@pytest.mark.parametrize("case", SIZES)
def test_its_gradients_are_those_of_pytorch(case: str, asked: tuple[bool, ...]) -> None:
    sizes, weights, stride, group = SIZES[case]
    x, weight = torch.randn(sizes), torch.randn(weights)
    dy = torch.randn_like(torch.conv2d(x, weight, None, stride, 1, 1, group))
    rest = ([weights[0]], [stride] * 2, [1, 1], [1, 1], False, [0, 0], group, [*asked])
    images = [t.contiguous(memory_format=LAST) for t in (dy, x)]
    found = convolutions.convolution_backward(*images, weight, *rest)
    exact = torch.ops.aten.convolution_backward(dy, x, weight, *rest)
    for one, other, is_asked in zip(found, exact, asked, strict=True):
        assert (one is not None) is is_asked
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    if found[0] is not None:
        assert found[0].is_contiguous(memory_format=LAST)

"""What of a tensor's place in memory decides how PyTorch's results lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ortrain.pytorch.layout import OVERLAPPING, laid, layout_of, nestings, without_gaps

IMAGES = torch.zeros(2, 3, 4, 5)
GREY = torch.zeros(2, 1, 4, 5)
LAST = torch.channels_last
IN_ORDER = torch.strided


@pytest.mark.parametrize(
    ("tensor", "layout"),
    [
        (IMAGES, IN_ORDER),
        (IMAGES[:, ::2, 1:], IN_ORDER),
        (IMAGES.to(memory_format=LAST), (0, 2, 3, 1)),
        (IMAGES.to(memory_format=LAST)[..., ::2], (0, 2, 3, 1)),
        (GREY, IN_ORDER),
        (GREY.to(memory_format=LAST), (0, 2, 3, 1)),
        (torch.zeros(2, 3, 1, 1), IN_ORDER),
        (torch.zeros(2, 3, 1, 1).to(memory_format=LAST), (0, 2, 3, 1)),
        (torch.zeros(3, 4).t(), (1, 0)),
        (torch.zeros(3, 1).t(), IN_ORDER),
        (torch.zeros(3, 1).expand(3, 4), IN_ORDER),
        (torch.zeros(1, 3, 5).expand(4, 3, 5).permute(2, 0, 1), (2, 1, 0)),
        (IMAGES[:1].to(memory_format=LAST).expand(4, -1, -1, -1), OVERLAPPING),
        (torch.zeros(()), IN_ORDER),
        (torch.eye(3).to_sparse(), torch.sparse_coo),
    ],
)
def test_the_order_of_the_axes(tensor: Tensor, layout: object) -> None:
    assert layout_of(tensor) == layout


def test_a_copy_without_gaps_lies_in_the_same_order() -> None:
    for tensor in (IMAGES[:, ::2], IMAGES.to(memory_format=LAST)[..., ::2], GREY):
        copied = without_gaps(tensor)
        assert layout_of(copied) == layout_of(tensor)
        assert (copied == tensor).all()


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 1, 4, 5), (1, 3, 1, 5)])
def test_a_tensor_is_laid_in_an_order(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    last = laid(tensor, (0, 2, 3, 1))
    assert torch.equal(last, tensor)
    assert last.stride() == torch.empty(shape, memory_format=LAST).stride()
    assert laid(last, (0, 1, 2, 3)).stride() == tensor.stride()


def test_nestings_tell_which_views_there_are() -> None:
    contiguous, last = IMAGES, IMAGES.to(memory_format=LAST)
    assert nestings(contiguous.shape, contiguous.stride()) == {(0, 1), (1, 2), (2, 3), (3, -1)}
    assert nestings(last.shape, last.stride()) == {(0, 2), (2, 3), (3, 1), (1, -1)}
    part = contiguous[:, :2]
    assert nestings(part.shape, part.stride()) < nestings(contiguous.shape, contiguous.stride())

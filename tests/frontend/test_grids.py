"""A tensor that is read at every place is a view of it; one that is read elsewhere is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.frontend.compiling import compiled

pytestmark = pytest.mark.filterwarnings("ignore")


def padding(mask: Tensor, x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0])[:, None, None, None]
    places = torch.arange(x.shape[1])[None, None, None, :]
    return torch.tanh(torch.tanh(x)[:, None, :, None] * mask[rows, places])


def turned(mask: Tensor, x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0])[None, :]
    places = torch.arange(x.shape[1])[:, None]
    return torch.tanh(torch.tanh(x) + mask[rows, places].t())


def paired(mask: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(torch.tanh(x) * mask[torch.arange(3), torch.arange(3)].sum())


def from_one(mask: Tensor, x: Tensor) -> Tensor:
    rows = torch.arange(1, x.shape[0])[:, None]
    return torch.tanh(torch.tanh(x[1:]) * mask[rows, torch.arange(x.shape[1])[None]])


def written(mask: Tensor, x: Tensor) -> Tensor:
    rows, places = torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1])[None]
    read = mask[rows, places]
    read.mul_(2)
    return torch.tanh(torch.tanh(x) * read) + mask


CASES = {padding: True, turned: False, paired: False, from_one: False, written: True}


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_it_is_read_as_in_pytorch(function: Callable[..., Tensor]) -> None:
    made: list[Any] = []
    call, _ = compiled(function, into=made, dynamic=True)
    for rows, length in ((3, 4), (5, 6), (4, 3)):
        mask, x = torch.randn(rows, length), torch.randn(rows, length)
        torch.testing.assert_close(call(mask, x), function(mask, x))
    reads = made[0].program.operators()
    assert (not reads["GatherND"] and not reads["Gather"]) is CASES[function]


def test_a_mask_of_fewer_rows_is_an_error_as_in_pytorch() -> None:
    call, _ = compiled(padding, dynamic=True)
    call(torch.ones(3, 4), torch.ones(3, 4))
    with pytest.raises(IndexError):
        padding(torch.ones(1, 4), torch.ones(3, 4))
    with pytest.raises(IndexError):
        call(torch.ones(1, 4), torch.ones(3, 4))

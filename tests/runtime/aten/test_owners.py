"""Whoever has a tensor beside one variable is seen, also while Dynamo runs Python's frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import set_eval_frame

from ortrain.runtime.aten.owners import is_alone

OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "a variable": lambda tensor: tensor,
    "a list": lambda tensor: [tensor],
    "detached": lambda tensor: tensor.detach(),
    "data": lambda tensor: tensor.data,
    "a view": lambda tensor: tensor[1:],
    "NumPy": lambda tensor: tensor.numpy(),
    "DLPack": lambda tensor: torch.utils.dlpack.from_dlpack(tensor),
    "the storage": lambda tensor: tensor.untyped_storage(),
    "a parameter": nn.Parameter,
    "autograd": lambda tensor: torch.ones(4, requires_grad=True) * tensor,
}


@pytest.fixture(params=["Python", "Dynamo"], autouse=True)
def frames(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "Python":
        yield
        return
    before = set_eval_frame(False)
    yield
    set_eval_frame(before)


def through_one_call() -> bool:
    tensor = torch.ones(4)
    return is_alone(tensor)


def through_two_calls() -> bool:
    tensor = torch.ones(4)
    return handed_on(tensor)


def handed_on(tensor: Tensor) -> bool:
    return is_alone(tensor, calls=2)


def test_what_one_variable_has_is_alone() -> None:
    for _ in range(20):  # Python compiles what runs often in another way
        assert through_one_call()
        assert through_two_calls()


@pytest.mark.parametrize("other", OTHERS)
def test_whoever_else_has_it_is_seen_until_it_lets_go(other: str) -> None:
    tensor = torch.ones(4)
    held = OTHERS[other](tensor)
    assert not is_alone(tensor)
    del held
    assert is_alone(tensor)

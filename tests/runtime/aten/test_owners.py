"""Whoever has a tensor beside one variable is seen, also while Dynamo runs Python's frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import set_eval_frame

from ortrain.runtime.aten.linear_loss import scaled
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
    "rows of its data": lambda tensor: tensor.data[:2],
    "its bytes": lambda tensor: tensor.data.view(torch.int32),
    "NumPy's tensor": lambda tensor: torch.from_numpy(tensor.numpy()),
    "set to its storage": lambda tensor: torch.empty(0).set_(tensor.untyped_storage()),
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


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("upstream", [1.0, 3.0])
def test_a_gradient_is_scaled_where_it_lies_unless_somebody_has_it(
    held: bool, upstream: float
) -> None:
    unit = torch.randn(50, 8)
    before, place, some = unit.clone(), unit.data_ptr(), unit.data if held else None
    found = scaled(unit, torch.tensor(upstream), torch.float32)
    torch.testing.assert_close(found, before * upstream)
    assert (found.data_ptr() == place) == (not held)
    assert some is None or torch.equal(some, before)

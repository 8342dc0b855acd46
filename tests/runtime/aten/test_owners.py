"""Whether a tensor's memory may be written anew: whoever can reach it has it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ortrain.runtime.aten.linear_loss import scaled
from ortrain.runtime.aten.owners import is_alone

# From where a tensor is reached: most bump no version of it.
WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "the tensor": lambda tensor: tensor,
    "its data": lambda tensor: tensor.data,
    "detached": lambda tensor: tensor.detach(),
    "NumPy": lambda tensor: torch.from_numpy(tensor.numpy()),
    "DLPack": lambda tensor: torch.utils.dlpack.from_dlpack(tensor.detach()),
    "its storage": lambda tensor: torch.empty(0).set_(tensor.untyped_storage()).view(50, -1),
    "rows of it": lambda tensor: tensor.data[:25],
    "a column of it": lambda tensor: tensor.data[:, 1],
    "its bytes": lambda tensor: tensor.data.view(torch.int32),
}


@pytest.mark.parametrize("way", WAYS)
def test_who_can_reach_a_tensor_has_it(way: str) -> None:
    tensor = torch.randn(50, 8)
    assert is_alone(tensor)
    some = WAYS[way](tensor)
    assert not is_alone(tensor)
    del some
    assert is_alone(tensor)


def test_a_storage_or_a_graph_has_its_tensor() -> None:
    tensor = torch.randn(50, 8)
    storage = tensor.untyped_storage()
    assert not is_alone(tensor)
    del storage
    squared = torch.ones(50, 8, requires_grad=True) * tensor
    assert not is_alone(tensor)
    del squared
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

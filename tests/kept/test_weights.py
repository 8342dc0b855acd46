"""Parameters that a call which stays PyTorch's writes to, in some later call alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from ortrain.errors import StateError


class Halving(nn.Module):
    """Halves its weight once a sum is large."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().sum()) > 100:
            with torch.no_grad():
                self.weight.mul_(0.5)
        return x * self.weight


class Calling(nn.Module):
    """Does so in a method, which is kept by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(4))

    def scaled(self, x: Tensor) -> Tensor:
        if float(x.detach().sum()) > 100:
            with torch.no_grad():
                self.weight.mul_(0.5)
        return x * self.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.inner(x)) + 1.0


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("part", [Halving, Calling])
def test_a_weight_that_is_written_to_is_never_written_to_twice(
    part: type[nn.Module], engine: Any
) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), part(), nn.Linear(4, 2))
    model = ORTModule(module, options=Options(engine=engine))
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
    assert model.report.mode == "graph"
    module[0].bias.data.fill_(1000.0)
    if isinstance(module[1], Calling):
        module[1].inner.weight.data.fill_(1.0)
    weight: Any = module[1].weight
    with pytest.raises(StateError, match=r"changed the parameter '(1\.)?weight' in place"):
        model(torch.ones(3, 4))
    assert weight.tolist() == [0.5] * 4

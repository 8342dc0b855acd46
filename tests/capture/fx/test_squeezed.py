"""A size that the code has seen to be 1 may be squeezed, though it is a symbol of the trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule

Function = Callable[[Tensor], Tensor]

SQUEEZES: dict[str, Function] = {
    "dimension": lambda x: x.squeeze(1),
    "from the end": lambda x: x.squeeze(-2),
    "with one that is known": lambda x: x.unsqueeze(0).squeeze((0, 2)),
    "two": lambda x: x.unsqueeze(1).squeeze((1, 2)),
}


class Checked(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        if x.size(1) != 1:
            raise ValueError("one channel is required")
        rows = self.function(self.layer(x))
        return torch.cat([rows, rows.sum(-1, keepdim=True)], -1)


@pytest.mark.parametrize("engine", ["onnxruntime", "aten"])
@pytest.mark.parametrize("name", SQUEEZES)
def test_a_size_that_was_asked_to_be_one_is_squeezed(name: str, engine: Any) -> None:
    eager = Checked(SQUEEZES[name])
    own = copy.deepcopy(eager)
    model = ORTModule(own, options=Options(engine=engine, fallback="raise"))
    for rows in (2, 3, 2):
        x = torch.randn(rows, 1, 4)
        for each in (model, eager):
            each.zero_grad()
            each(x).square().sum().backward()
        torch.testing.assert_close(model(x), eager(x))
        torch.testing.assert_close(own.layer.weight.grad, eager.layer.weight.grad)
    assert model.report.mode == "graph"
    with pytest.raises(ValueError, match="one channel"):
        model(torch.randn(2, 2, 4))

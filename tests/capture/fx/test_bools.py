"""Bools among numbers are ones and zeros; among bools they stay what they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule

USES: dict[str, Callable[[Tensor], Tensor]] = {
    "x + True": lambda x: x + True,
    "True + x": lambda x: True + x,
    "x * True": lambda x: x * True,
    "x / True": lambda x: x / True,
    "True / x": lambda x: True / (x.square() + 1),
    "x ** True": lambda x: x**True,
    "x == True": lambda x: (x == True) * x,  # noqa: E712
    "x > True": lambda x: (x > True) * x,
    "x <= False": lambda x: (x <= False) * x,
    "where(c, x, True)": lambda x: torch.where(x > 0, x, True),
    "where(c, False, x)": lambda x: torch.where(x > 0, False, x),
    "masked_fill(c, True)": lambda x: x.masked_fill(x > 0, True),
    "clamp(min=False)": lambda x: x.clamp(min=False),
    "remainder(True)": lambda x: x.remainder(True),
    "full(True)": lambda x: x + torch.full((4,), True),
    "full_like(x, True)": lambda x: x * torch.full_like(x, True),
    "addcmul(value=True)": lambda x: torch.addcmul(x, x, x, value=True),
    "lerp(True)": lambda x: torch.lerp(x, 2 * x, True),
    "threshold(False, True)": lambda x: nn.functional.threshold(x, False, True),
    "whole numbers + True": lambda x: x + (torch.arange(4) + True),
    "whole numbers * True": lambda x: x + (torch.arange(4) * True),
    "whole numbers > True": lambda x: x + (torch.arange(4) > True),
    "bools + True": lambda x: x + ((x > 0) + True),
    "bools & True": lambda x: x + ((x > 0) & True),
    "bools ^ True": lambda x: x * ((x > 0) ^ True),
    "bools == False": lambda x: x * ((x > 0) == False),  # noqa: E712
    "where of bools": lambda x: x * torch.where(x > 1, x > 0, x < 0),
    "where of bools and one": lambda x: x * torch.where(x > 1, True, x < 0),
    "masked_fill of bools": lambda x: x * (x > 0).masked_fill(x > 1, False),
}


class Using(nn.Module):
    """A layer, and a bool behind it."""

    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(4, 4), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.layer(x))


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("use", USES)
def test_a_bool_is_what_torch_takes_it_for(use: str, engine: Any) -> None:
    torch.manual_seed(0)
    module = Using(USES[use])
    eager = copy.deepcopy(module)
    model = ORTModule(module, options=Options(engine=engine, fallback="raise"))
    x = torch.randn(5, 4)
    found, expected = model(x), eager(x)
    torch.testing.assert_close(found, expected)
    for output in (found, expected):
        output.square().sum().backward()
    for mine, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)

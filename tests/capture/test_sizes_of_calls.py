"""What a forward makes by its sizes is made by those of each call: one graph serves them all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ortrain import Options, ORTModule

MADE: dict[str, Callable[[Tensor, int], Any]] = {
    "identity": lambda x, n: torch.eye(n) @ x,
    "wide identity": lambda x, n: torch.eye(n, n + 2)[:, 1:-1] @ x,
    "identity of bits": lambda x, n: (x @ x.T).masked_fill(torch.eye(n, dtype=torch.bool), 0),
    "identity of whole numbers": lambda x, n: (
        x * torch.eye(n, 3, dtype=torch.int64).sum(1)[:, None]
    ),
    "filled diagonal": lambda x, n: (x @ x.T).fill_diagonal_(0.5).softmax(1),
    "filled diagonal of bits": lambda x, n: x * torch.ones(n, n).bool().fill_diagonal_(False).sum(),
    "filled diagonal of a wide matrix": lambda x, n: (x @ x.T)[:, 1:].fill_diagonal_(fill_value=2),
    "pooled windows": lambda x, n: functional.max_pool1d(x.T[None], 2),
    "pooled windows of its own kind": lambda x, n: functional.max_pool1d(
        x.T.round()[None], (3,), stride=[1], padding=1, dilation=(1,), ceil_mode=True
    ),
    "a layer of windows": lambda x, n: nn.MaxPool1d(2, ceil_mode=True)(x.T),
}


class Made(nn.Module):
    """Makes something by the number of its rows."""

    def __init__(self, made: Callable[[Tensor, int], Any]) -> None:
        super().__init__()
        self.linear, self.made = nn.Linear(4, 4), [made]

    def forward(self, x: Tensor) -> Any:
        return self.made[0](self.linear(x), x.shape[0])


def step(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    loss = model(x).float().square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("made", MADE)
def test_what_a_forward_makes_by_its_sizes_is_made_at_each_call(made: str) -> None:
    model = Made(MADE[made])
    compiled = ORTModule(copy.deepcopy(model), options=Options(engine="aten", fallback="raise"))
    for rows in (4, 6, 3):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(step(compiled, x), step(model, x))
    assert compiled.report.captures == 1

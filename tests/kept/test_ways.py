"""Calls that stay PyTorch's and give several results, each of which depends on some of its inputs.

Of ``return y * 2, mask * 3`` the second has no gradient where ``mask`` has none.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.breadth import crossed
from tests.kept.routines import number
from tests.kept.twins import Twins

# What a result is a product of: a hidden tensor, which has a gradient, an argument, which may have
# one, and a mask, which never has.
WAYS = ("module", "method", "function")
SETS = ("h", "a", "m", "ha", "hm", "am", "ham")


def results(chosen: tuple[str, ...], given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    found = []
    for place, names in enumerate(chosen):
        value = torch.full_like(given[0], place + 2.0)
        for name in names:
            value = value * given["ham".index(name)]
        found.append(value)
    return tuple(found)


class Inner(nn.Module):
    def __init__(self, chosen: tuple[str, ...]) -> None:
        super().__init__()
        self.chosen = chosen

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        return results(self.chosen, given)


class Function(torch.autograd.Function):
    """Both of whose results have a gradient where one of its inputs has."""

    @staticmethod
    def forward(ctx: Any, chosen: tuple[str, ...], *given: Tensor) -> tuple[Tensor, ...]:
        ctx.chosen = chosen
        ctx.save_for_backward(*given)
        return results(chosen, given)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        with torch.enable_grad():
            given = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            found = results(ctx.chosen, tuple(given))
        return None, *torch.autograd.grad(found, given, upstream, allow_unused=True)


class Outer(nn.Module):
    """Returns what the call gives, and what comes of it."""

    def __init__(self, chosen: tuple[str, ...], way: str) -> None:
        super().__init__()
        self.layer, self.inner, self.way = nn.Linear(4, 4), Inner(chosen), way

    def method(self, *given: Tensor) -> tuple[Tensor, ...]:
        return results(self.inner.chosen, (given[0] * (number(given[0]) < 1e9), *given[1:]))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        given = (torch.tanh(self.layer(x)), x, (x > 0).float())
        if self.way == "function":
            found: tuple[Tensor, ...] = Function.apply(self.inner.chosen, *given)
        else:
            found = self.inner(*given) if self.way == "module" else self.method(*given)
        return (*found, given[0] + torch.sin(found[0]) * found[-1])


@pytest.mark.parametrize(
    ("first", "second", "engine", "way", "asked"),
    crossed(SETS, SETS, ("aten", "onnxruntime"), WAYS, (False, True), one_in=7),
)
def test_each_result_has_the_gradient_that_its_inputs_give_it(
    first: str, second: str, engine: str, way: str, asked: bool
) -> None:
    options = {"keep_in_torch": ("inner",)} if way == "module" else {}
    twins = Twins(Outer((first, second), way), engine, **options)
    for batch in (3, 2):
        twins.step(torch.randn(batch, 4).requires_grad_(asked))

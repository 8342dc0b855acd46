"""Checks of values that only raise: the graph passes them, and an error is the module's own."""

from __future__ import annotations

import copy
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import ORTModule
from tests.module.agreement import GRAPH, SAME
from tests.module.checked import CHECKED, plain


class Module(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def outcome(module: nn.Module, x: Tensor) -> tuple[Any, ...]:
    """What a call returns and its gradients, or the error that it raises."""
    module.zero_grad()
    try:
        output = module(x)
    except Exception as error:
        return type(error), str(error)
    output.sum().backward()
    return output.detach(), *[p.grad.clone() for p in module.parameters()]


@pytest.mark.parametrize("function", CHECKED)
def test_values_raise_what_eager_raises_and_nothing_else_does(function: Any) -> None:
    eager = Module(function)
    model = ORTModule(copy.deepcopy(eager), options=GRAPH)
    x = torch.randn(4, 3)
    for given in (x, torch.full((4, 3), 1e4), x + 1, -torch.full((4, 3), 1e4), x):
        ours, theirs = outcome(model, given), outcome(eager, given)
        for mine, own in zip(ours, theirs, strict=True):
            if isinstance(own, Tensor) and isinstance(mine, Tensor):
                largest = max(float(own.nan_to_num().abs().max()), 1e-3)
                torch.testing.assert_close(mine, own, rtol=0, atol=SAME * largest, equal_nan=True)
            else:
                assert mine == own, (ours, theirs)
    assert model.report.mode == "graph"
    assert model.report.graph_calls >= 3


def test_a_first_call_that_raises_is_eagers_and_the_next_is_a_graph() -> None:
    model = ORTModule(Module(plain), options=GRAPH)
    with pytest.raises(ValueError, match="too large"):
        model(torch.full((4, 3), 1e4).sign() * 1e9 * model.layer.weight[0].sign())
    model(torch.randn(4, 3))
    assert model.report.mode == "graph"


class Branching(nn.Module):
    """A module with a branch on each of its inputs' values, a line for each, in a file."""

    def __init__(self, count: int, folder: Path) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        branches = [f"    if x[{i}] > 0: out = out + {i}" for i in range(count)]
        file = folder / "branching.py"
        file.write_text("\n".join(("def function(x, out):", *branches, "    return out")))
        self.function: Callable[[Tensor, Tensor], Tensor] = runpy.run_path(str(file))["function"]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.function(x, self.weight * 1))

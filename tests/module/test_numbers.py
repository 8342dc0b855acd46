"""Numbers that change from call to call are inputs of a graph, where tensors can stand for them."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from tests.module.agreement import GRAPH

FALLBACK = replace(GRAPH, fallback="torch")


class Weighted(nn.Module):
    """Uses a number among its arguments in one way."""

    def __init__(self, use: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.use = use

    def forward(self, value: Tensor, number: Any = 0.5) -> Any:
        return self.use(self.layer(value), number)


def looped(hidden: Tensor, number: int) -> Any:
    """A graph has as many rounds as its number."""
    return sum(hidden * i for i in range(1, number))


def summed(hidden: Tensor, number: int) -> Tensor:
    return hidden.sum(number)


USES: dict[str, tuple[Any, list[Any], bool]] = {
    "factor": (lambda h, n: h * n, [0.1, 0.2, 0.3, 1e-9], True),
    "summand": (lambda h, n: h.tanh() + n, [1, 2, 3, 4], True),
    "quotient": (lambda h, n: h / (1 + n), [0.5, 0.25, 2.0, 3.0], True),
    "exponent": (lambda h, n: h.sigmoid() ** n, [1.5, 2.5, 0.5, 3.0], True),
    "of a loss": (lambda h, n: h.square().mean() * n, [0.1, 0.2, 0.3, 0.4], True),
    "of integers": (lambda h, n: h + torch.arange(3) * n, [2, 3, 4, 5], True),
    "nested": (
        lambda h, n: h * n["a"][0] + n["b"], [{"a": [i], "b": i / 2} for i in range(4)], True
    ),
    "branch": (lambda h, n: h * n if n > 0.05 else -h, [0.1, 0.2, 0.3, 0.4], True),
    "size": (lambda h, n: h[:, :n], [1, 2, 3, 2], True),
    "loop": (looped, [2, 3, 4, 5], False),
    "dimension": (summed, [0, 1, 0, 1], True),
    "dropout": (
        lambda h, n: nn.functional.dropout(h, n, h.requires_grad and n > 1), [0.1, 0.2] * 2, False
    ),
    "by type": (lambda h, n: h * 2 if isinstance(n, float) else h * 3, [0.1, 0.2, 0.3, 0.4], True),
}  # fmt: skip


@pytest.mark.parametrize("name", USES)
def test_a_number_that_changes_gives_what_eager_gives(name: str) -> None:
    use, numbers, moves = USES[name]
    eager = Weighted(use)
    model = ORTModule(copy.deepcopy(eager), options=FALLBACK)
    for number in numbers:
        value = torch.randn(5, 4)
        for each in (eager, model):
            each.zero_grad()
            each(value, number).sum().backward()
        found, expected = model(value, number=number), eager(value, number=number)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(model.module.layer.weight.grad, eager.layer.weight.grad)
    assert model.report.mode == "graph"
    # By position and by keyword: one form each for the first value, and one for all others.
    assert model.report.captures == 4 if moves else model.report.captures > 4


def test_in_float64_a_number_keeps_its_digits() -> None:
    eager = Weighted(lambda h, n: h * n).double()
    model = ORTModule(copy.deepcopy(eager), options=GRAPH)
    for number in (0.1, 0.2, 1 / 3):
        value = torch.randn(5, 4, dtype=torch.float64)
        torch.testing.assert_close(model(value, number), eager(value, number), rtol=1e-14, atol=0)
    assert model.report.captures == 2


def test_a_number_that_stays_is_a_constant() -> None:
    model = ORTModule(Weighted(lambda h, n: h * n), options=GRAPH)
    for _ in range(3):
        model(torch.randn(5, 4), 0.5)
    assert model.report.captures == 1


class Exponential(nn.Module):
    """Computes with a number in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, value: Tensor, number: float) -> Tensor:
        return self.layer(value) * math.exp(number)


def test_a_number_that_the_code_computes_with_in_python_has_a_graph_for_each_value() -> None:
    eager = Exponential()
    model = ORTModule(copy.deepcopy(eager), options=FALLBACK)
    value = torch.randn(5, 4)
    for i in range(12):
        number = i % 6 / 7
        torch.testing.assert_close(model(value, number), eager(value, number))
    assert (model.report.captures, model.report.graph_calls) == (6, 12)


def test_by_default_a_curriculum_is_one_contest() -> None:
    eager = Weighted(lambda h, n: (h * n).square().mean())
    model = ORTModule(copy.deepcopy(eager), options=Options())
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (eager, model)]
    for i in range(300):
        value, losses = torch.randn(5, 4), []
        for each, optimizer in zip((eager, model), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(each(value, 1.0 - i / 300))
            losses[-1].backward()
            optimizer.step()
        torch.testing.assert_close(losses[0], losses[1])
    assert model.report.captures == 2  # for the first value, and for all others
    assert model.report.contest is not None
    assert model.report.contest.winner


def test_two_numbers_one_of_which_stays() -> None:
    class Two(nn.Module):
        def forward(self, value: Tensor, a: float, b: int) -> Tensor:
            return value * a if b > 1 else value - a

    eager = Two()
    model = ORTModule(Two(), options=GRAPH)
    value = torch.randn(3)
    for i in range(6):
        torch.testing.assert_close(model(value, i / 3, 2), eager(value, i / 3, 2))
    assert model.report.captures == 2

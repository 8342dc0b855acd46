"""Numbers that a module holds and that change from step to step are inputs of its graph."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from tests.breadth import crossed
from tests.module.agreement import GRAPH, SAME

pytestmark = pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
FALLBACK = replace(GRAPH, fallback="torch")


class Held(nn.Module):
    """Uses numbers of its own and of a child in one way."""

    def __init__(self, use: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self.layer, self.child = nn.Linear(4, 3), nn.Linear(3, 3)
        self.number: Any = 0.0
        self.child.number = 1.0
        self.use = use

    def forward(self, x: Tensor) -> Any:
        return self.use(self.child(self.layer(x)), self)


def in_python(hidden: Tensor, module: Any) -> Tensor:
    """It has a name, by which it is found where it might stay PyTorch's."""
    return hidden * math.exp(module.number)


# Each use, values of both numbers for eight calls, and how many of these a graph serves at least.
USES: dict[str, tuple[Callable[[Tensor, Any], Any], Callable[[int], tuple[Any, Any]], int]] = {
    "factor": (lambda h, m: h * m.number, lambda i: (i / 7, 1.0), 8),
    "both": (lambda h, m: h * m.number + h.tanh() / m.child.number, lambda i: (i, 1 + i / 9), 8),
    "temperature": (lambda h, m: (h / (1 + m.number)).softmax(-1), lambda i: (1 / (i + 1), 1.0), 8),
    "exponent": (lambda h, m: h.sigmoid() ** m.number, lambda i: (i / 2, 1.0), 8),
    "of a loss": (lambda h, m: h.square().mean() * m.number, lambda i: (0.9**i, 1.0), 8),
    "integer": (lambda h, m: h + torch.arange(3) * m.number, lambda i: (i, 1.0), 8),
    "alternating": (lambda h, m: h * m.number, lambda i: (i % 2, 1.0), 8),
    "branch": (lambda h, m: h if m.number > 0.4 else -h, lambda i: (i / 7, 1.0), 4),
    "in Python": (lambda h, m: h * math.exp(m.number), lambda i: (i / 7, 1.0), 0),
    "in a function's Python": (in_python, lambda i: (i / 7, 1.0), 0),
    "size": (lambda h, m: h[: m.number + 1], lambda i: (i % 3, 1.0), 0),
    "loop": (lambda h, m: sum(h * i for i in range(1, m.number + 2)), lambda i: (i % 4, 1.0), 0),
    "of dropout": (
        lambda h, m: nn.functional.dropout(h, m.number, training=False), lambda i: (i / 9, 1.0), 0
    ),
    "by type": (
        lambda h, m: h * 2 if isinstance(m.number, float) else h * 3, lambda i: (i / 7, 1.0), 0
    ),
    "type changes": (lambda h, m: h * m.number, lambda i: ((i, i / 2)[i % 2], 1.0), 0),
    "beside what changes": (lambda h, m: h * m.child.number, lambda i: ([i], i / 2), 0),
}  # fmt: skip


def step(module: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    module.zero_grad()
    output = run(x)
    output.square().sum().backward()
    return [output.detach(), *[p.grad.clone() for p in module.parameters() if p.grad is not None]]


@pytest.mark.parametrize("name", USES)
def test_what_changes_gives_what_eager_gives(name: str) -> None:
    use, values, least = USES[name]
    eager = Held(use)
    ours = copy.deepcopy(eager)
    model = ORTModule(ours, options=FALLBACK)
    for call in range(8):
        for each in (eager, ours):
            each.number, each.child.number = values(call)
        x = torch.randn(5, 4)
        for mine, its in zip(step(ours, model, x), step(eager, eager, x), strict=True):
            torch.testing.assert_close(mine, its, rtol=SAME, atol=SAME)
        assert (ours.number, ours.child.number) == values(call)
    assert model.report.graph_calls >= least
    if least == 8:
        assert model.report.captures <= 3


def test_by_default_an_annealed_weight_is_one_contest() -> None:
    model = ORTModule(Held(lambda h, m: h * m.number))
    for call in range(400):
        model.module.number = 1 / (call + 1)
        model(torch.randn(5, 4)).sum().backward()
    contest = model.report.contest
    assert contest is not None
    assert contest.winner
    assert model.report.captures == 2  # for the first value, and for all others


def test_a_backward_has_the_numbers_of_its_forward() -> None:
    """Two forwards with two values, then two backwards; and a derivative of the gradient."""

    def use(h: Tensor, m: Any) -> Tensor:
        return (h * m.number).tanh()

    eager = Held(use)
    ours = copy.deepcopy(eager)
    model = ORTModule(ours, options=FALLBACK)
    for call in range(5):
        found = []
        x = torch.randn(5, 4)
        for module, run in ((ours, model), (eager, eager)):
            module.zero_grad()
            module.number = float(call)
            first = run(x)
            module.number = call + 0.5
            second = run(x)
            module.number = -1.0
            (second.sum() * 2).backward()
            first.sum().backward()
            found.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
        for mine, its in zip(*found, strict=True):
            torch.testing.assert_close(mine, its, rtol=SAME, atol=SAME)
    assert model.report.graph_calls == 10
    found = []
    x = torch.randn(5, 4, requires_grad=True)
    for module, run in ((ours, model), (eager, eager)):
        module.number = 3.0
        output = run(x)
        module.number = 100.0
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), [x, *module.layer.parameters()]))
    for mine, its in zip(*found, strict=True):
        torch.testing.assert_close(mine, its, rtol=SAME, atol=SAME)


def test_training_and_evaluation_each_have_their_graphs() -> None:
    eager = Held(lambda h, m: nn.functional.dropout(h, 0.5, m.training) * m.number)
    model = ORTModule(eager, options=FALLBACK)
    for epoch in range(6):
        eager.number = 1 / (epoch + 1)
        for _ in range(2):
            model.train()
            model(torch.randn(5, 4)).sum().backward()
        model.eval()
        x = torch.randn(5, 4)
        with torch.no_grad():
            torch.testing.assert_close(model(x), eager(x), rtol=SAME, atol=SAME)
    assert model.report.captures <= 6
    assert model.report.inference is not None
    assert model.report.inference.graph_calls == 6


def test_an_attribute_that_the_forward_writes_is_refused_still() -> None:
    def use(h: Tensor, m: Any) -> Tensor:
        m.number = m.number + 1
        return h * m.number

    eager = Held(use)
    ours = copy.deepcopy(eager)
    model = ORTModule(ours, options=FALLBACK)
    for _ in range(6):
        x = torch.randn(5, 4)
        torch.testing.assert_close(model(x), eager(x))
    assert ours.number == eager.number == 6


def test_in_float64_an_attribute_keeps_its_digits() -> None:
    eager = Held(lambda h, m: h * m.number).double()
    model = ORTModule(eager, options=Options(engine="onnxruntime"))
    for call in range(5):
        eager.number = 1 / (call + 3)
        x = torch.randn(5, 4, dtype=torch.float64)
        torch.testing.assert_close(model(x), eager(x), rtol=1e-14, atol=1e-14)
    assert model.report.captures == 2


# Uses of a number that a tensor in its place would answer otherwise, at 5 alone.
TOLD_APART: dict[str, Callable[[Any], float]] = {
    "isinstance": lambda n: 2.0 if isinstance(n, int) and n == 5 else 1.0,
    "is_tensor": lambda n: 2.0 if not torch.is_tensor(n) and n == 5 else 1.0,
    "a dictionary": lambda n: {5: 2.0}.get(n, 1.0),
    "a set": lambda n: 2.0 if n in {5, 9} else 1.0,
    "its name": lambda n: len(repr(n)) * (2.0 if str(n) == "5" else 1.0),
    "type": lambda n: 2.0 if type(n) is int and n == 5 else 1.0,
    "an index": lambda n: [1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0][n],
}


@pytest.mark.parametrize(("name", "held"), crossed(TOLD_APART, [True, False], one_in=2))
def test_what_tells_a_number_from_a_tensor_has_the_number(name: str, held: bool) -> None:
    factor = TOLD_APART[name]

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.number = nn.Linear(4, 3), 0

        def forward(self, x: Tensor, number: int | None = None) -> Tensor:
            value = self.number if number is None else number
            return self.layer(x) * value * factor(value)

    module = Asks()
    model = ORTModule(module, options=FALLBACK)
    for number in range(8):
        x = torch.randn(5, 4)
        module.number = number
        given = (x,) if held else (x, number)
        torch.testing.assert_close(model(*given), module(*given), rtol=SAME, atol=SAME)

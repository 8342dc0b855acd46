"""Branches that random numbers decide: how likely a call goes the way of another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from ortrain.capture.export import capture
from ortrain.capture.trace.refusal import Refusal
from ortrain.capture.trace.value_checks import Ways

pytestmark = pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")

# A condition of probability 0.3, its negation, and what is certain.
DRAWN: dict[str, tuple[Callable[[], Any], float]] = {
    "rand([]) < p": (lambda: torch.rand([]) < 0.3, 0.3),
    "p > rand(1)": (lambda: torch.rand(1) < 0.3, 0.3),
    "rand(()).le": (lambda: torch.rand(()).le(0.3), 0.3),
    "torch.ge": (lambda: torch.ge(torch.rand(1), 0.3), 0.7),
    "rand(1).item()": (lambda: torch.rand(1).item() < 0.3, 0.3),
    "rand(1).to(float64)": (lambda: torch.rand(1).to(torch.float64).squeeze() > 0.3, 0.7),
    "never": (lambda: torch.rand([]) < 0.0, 0.0),
    "always": (lambda: torch.rand([]) < 1.0, 1.0),
}


@pytest.mark.parametrize("name", DRAWN)
def test_the_chance_is_that_of_the_way_which_was_taken(name: str) -> None:
    question, probability = DRAWN[name]
    for seed in range(6):
        torch.manual_seed(seed)
        ways = Ways()
        with ways.noted():
            taken = bool(question())
        expected = probability if taken else 1 - probability
        assert ways.chance == pytest.approx(expected)
        assert ways.drawn.startswith("test_chances.py")


@pytest.mark.parametrize(
    "question",
    [
        lambda: torch.rand(3).sum() > 1,
        lambda: torch.ones(()) > 0.5,
        lambda: torch.randn(()) < 0.1,
        lambda: torch.rand(()) < torch.tensor(0.3),
    ],
)
def test_other_numbers_have_no_chance_that_is_known(question: Callable[[], Tensor]) -> None:
    ways = Ways()
    with ways.noted():
        bool(question())
    assert ways.chance == 1.0


class Dropping(nn.Module):
    """Leaves out each of its layers with some probability."""

    def __init__(self, count: int, probability: float) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count)]
        self.layers, self.probability = nn.ModuleList(blocks), probability

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and torch.rand([]) < self.probability:
                continue
            x = layer(x)
        return x


@pytest.mark.parametrize(("count", "probability"), [(12, 0.1), (3, 0.3), (1, 0.5)])
def test_a_module_that_leaves_out_layers_is_refused_at_once(count: int, probability: float) -> None:
    with pytest.raises(Refusal, match="random numbers decide") as caught:
        capture(Dropping(count, probability), (torch.randn(2, 4),), {}, branches=True)
    assert caught.value.drawn


@pytest.mark.parametrize(("count", "probability"), [(12, 0.0), (12, 0.01), (1, 0.1)])
def test_a_module_that_seldom_does_is_one_graph(count: int, probability: float) -> None:
    torch.manual_seed(4)  # of which no layer is left out
    captured = capture(Dropping(count, probability), (torch.randn(2, 4),), {}, branches=True)
    assert captured.branches


def test_its_layers_train_as_graphs() -> None:
    model = ORTModule(Dropping(6, 0.3), options=Options(engine="aten"))
    x = torch.randn(2, 4)
    for seed in range(6):
        torch.manual_seed(seed)
        output = model(x)
        torch.manual_seed(seed)
        torch.testing.assert_close(output, model.module(x), rtol=1e-5, atol=1e-6)
        output.sum().backward()
    assert model.report.mode == "parts"
    assert [*model.report.parts] == [f"layers.{i}" for i in range(6)]
    assert "test_chances.py" in model.report.reason

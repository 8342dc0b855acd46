"""``Options(memory_budget=…)``: what a step holds is known, bounded, and changes no number."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import ortrain
from ortrain import Options, ORTModule
from ortrain.errors import BudgetError
from ortrain.frontend.graph import Graph
from tests.breadth import crossed
from tests.models import MODELS
from tests.tensors_held import TensorsHeld


class Blocks(nn.Module):
    """Layers whose results are larger than their weights, with dropout."""

    def __init__(self, count: int = 6, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(count)
        )
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.dropout(layer(torch.tanh(x)))
        return x.square().mean()


class Pools(nn.Module):
    """Windows that overlap, of which a step keeps the places of the maxima."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = nn.functional.max_pool2d(torch.tanh(x * self.scale), 3, 1, 1)
        again = nn.functional.max_pool2d(pooled.sin(), 3, 1, 1)
        return again.square().mean()


def wrapped(module: nn.Module, budget: Any, engine: Any = "aten") -> ORTModule:
    options = Options(engine=engine, memory_budget=budget, fallback="raise", skip_padding=False)
    return ORTModule(copy.deepcopy(module), options=options)


def step(model: nn.Module, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Loss and gradients of one training step."""
    model.zero_grad()
    torch.manual_seed(5)
    output = model(*args, **kwargs)
    loss = output if isinstance(output, torch.Tensor) else output[0]
    loss.backward()
    return [loss.detach(), *[p.grad for p in model.parameters() if p.grad is not None]]


@pytest.mark.parametrize(
    ("budget", "engine"), crossed([0.9, 0.6, "least"], ["aten", "onnxruntime"], one_in=2)
)
def test_numbers_are_the_same_to_the_bit(budget: Any, engine: str) -> None:
    module, x = Blocks(), torch.randn(256, 16)
    plain, frugal = wrapped(module, None, engine), wrapped(module, budget, engine)
    for mine, theirs in zip(step(frugal, x), step(plain, x), strict=True):
        assert torch.equal(mine, theirs)
    assert frugal.report.saved_bytes < plain.report.saved_bytes
    assert frugal.report.peak_bytes < plain.report.peak_bytes


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        *crossed(["bert", "gpt2", "vit", "perceptron"], [None, 0.7, "least"], one_in=2),
        ("pools", None),
    ],
)
def test_the_peak_is_the_predicted_one(
    monkeypatch: pytest.MonkeyPatch, name: str, budget: Any
) -> None:
    ran: dict[Graph, tuple[Any, ...]] = {}
    own = Graph.run

    def run(self: Graph, *call: Any) -> Any:
        ran[self] = call
        return own(self, *call)

    monkeypatch.setattr(Graph, "run", run)
    if name == "perceptron":
        module, inputs = Blocks(8, 32).train(), {"x": torch.randn(512, 32)}
    elif name == "pools":
        module, inputs = Pools(), {"x": torch.randn(4, 8, 48, 48)}
    else:
        case = MODELS[name]
        module, inputs = case.build().train(), case.batch(16, 24)
    model = wrapped(module, budget)
    try:
        step(model, **inputs)
    except BudgetError as error:  # of a small model gradients are the most
        model = wrapped(module, error.least)
        step(model, **inputs)
    step(model, **inputs)  # behind which it takes no copy of what another backward would read
    model.zero_grad()
    ((graph, call),) = ran.items()
    with TensorsHeld() as held:  # under which ORTModule itself would leave a call to PyTorch
        outputs = graph.run(*call)
        outputs[0].backward()
    assert model.report.peak_bytes == pytest.approx(held.most, rel=0.08)


def test_a_budget_of_bytes_holds_for_larger_calls() -> None:
    module = Blocks()
    small, large = torch.randn(64, 16), torch.randn(512, 16)
    plain = wrapped(module, None)
    step(plain, large)
    allowed = int(0.7 * plain.report.peak_bytes)
    model = wrapped(module, allowed)
    step(model, small)
    assert 0 < model.report.peak_bytes < allowed
    for mine, theirs in zip(step(model, large), step(plain, large), strict=True):
        assert torch.equal(mine, theirs)
    assert allowed / 2 < model.report.peak_bytes <= allowed
    assert model.report.captures == 1


def test_less_than_is_possible_is_an_error_and_no_fallback() -> None:
    options = Options(engine="aten", memory_budget=1000)
    model = ORTModule(Blocks(), options=options)
    with pytest.raises(BudgetError, match="the least that is possible") as caught:
        model(torch.randn(64, 16))
    assert isinstance(caught.value, MemoryError)
    least = ORTModule(Blocks(), options=Options(engine="aten", memory_budget=caught.value.least))
    least(torch.randn(64, 16)).backward()
    assert least.report.peak_bytes == caught.value.least


def test_auto_keeps_to_it_too() -> None:
    model = ORTModule(Blocks(), options=Options(memory_budget=0.7))
    model(torch.randn(64, 16)).backward()
    assert model.report.engine.startswith("aten")
    assert model.report.contest is None


@pytest.mark.parametrize("level", ["1", "2"])
def test_the_old_level_asks_for_the_least(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", level)
    assert Options().memory_budget == "least"
    assert Options(memory_budget=0.5).memory_budget == 0.5


def test_a_level_that_does_not_exist_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "3")
    with pytest.raises(ValueError, match="expected 0, 1 or 2"):
        Options()


@pytest.mark.parametrize("budget", [0, -1, 0.0, 1.5, -0.5, float("nan"), float("inf"), "half"])
def test_what_is_no_budget_is_refused(budget: Any) -> None:
    with pytest.raises(ValueError, match="memory_budget"):
        Options(memory_budget=budget)


@pytest.mark.parametrize("engine", ["torch", "reference"])
def test_engines_that_keep_none_are_refused(engine: Any) -> None:
    with pytest.raises(ValueError, match="take engine='aten'"):
        Options(memory_budget=0.5, engine=engine)


def test_a_budget_of_the_environment_is_told_by_the_name_of_its_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "1")
    with pytest.raises(ValueError, match="of ORTMODULE_MEMORY_OPT_LEVEL with engine='torch'"):
        Options(engine="torch")
    assert Options(engine="torch", memory_budget=None).memory_budget is None
    assert Options(engine="aten").memory_budget == "least"


def test_a_budget_of_a_small_step_is_told_in_bytes() -> None:
    model = ORTModule(nn.Linear(4, 2), options=Options(engine="aten", memory_budget=8))
    with pytest.raises(BudgetError, match=r"memory_budget=8, 8 bytes") as caught:
        model(torch.randn(3, 4)).sum().backward()
    assert "0.0 MiB" not in str(caught.value)


def test_explain_shows_the_curve_and_the_largest_batch(tmp_path: Any) -> None:
    x = torch.randn(64, 16)
    found = ortrain.explain(Blocks(), x, options=Options(engine="aten"))
    memory = found.memory
    assert memory is not None
    text = str(found)
    assert "saved for the backward" in text
    assert "layers.5" in text
    limit = memory.peak() * 3
    largest = memory.largest_batch(limit)
    assert largest > 64
    assert memory.peak(**{memory.batch: largest}) <= limit
    assert memory.peak(**{memory.batch: largest + 1}) > limit
    memory.save_svg(tmp_path / "curve.svg")
    assert "<polyline" in (tmp_path / "curve.svg").read_text()

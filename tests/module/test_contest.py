"""With default options the faster of graph and eager stays, and results are eager's throughout."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import ORTModule
from ortrain.runtime import engines
from ortrain.step import marks
from tests.models import MODELS
from tests.module.agreement import GRAPH, RELATIVE, loss_of


class Clock:
    """Time that passes where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def passing(self, function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        """The function, which takes so many seconds longer."""

        def longer(*args: Any) -> Any:
            self.now += seconds
            return function(*args)

        return longer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(marks, "clock", fake)
    return fake


class Work(marks.Event):
    """An event of a GPU that does what a test says, later than the CPU asks for it."""

    asked = done = 0.0

    def __init__(self) -> None:
        self.at = Work.asked

    def __sub__(self, earlier: marks.Event) -> float:
        assert isinstance(earlier, Work)
        assert self.is_reached(), "the time of an event that has not come is not known"
        return self.at - earlier.at

    def is_reached(self) -> bool:
        return Work.done >= self.at

    def wait(self) -> None:
        Work.done = max(Work.done, self.at)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(marks, "Event", Work)
    monkeypatch.setattr(Work, "asked", 0.0)
    monkeypatch.setattr(Work, "done", 0.0)
    return torch.device("cuda")


def test_the_time_of_a_cpu_is_a_number(clock: Clock) -> None:
    clock.now = 3.0
    assert marks.now(torch.device("cpu")) == marks.now(None) == 3.0
    assert marks.seconds(3.0, 3.5) == 0.5
    assert marks.is_reached(3.0)


def train(model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(3, 4)).sum().backward()
        model.zero_grad()


@pytest.mark.parametrize("name", ["mlp", "bert", "cnn"])
def test_training_is_eagers_whoever_runs(name: str) -> None:
    case = MODELS[name]
    eager = case.build()
    model = ORTModule(copy.deepcopy(eager))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, eager)]
    modes = set()
    for number in range(30):
        batch = case.batch(2 + number % 3, 5 + number % 2, seed=number)
        losses = []
        for each, optimizer in zip((model, eager), optimizers, strict=True):
            optimizer.zero_grad()
            loss = loss_of(each(**batch))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        modes.add(model.report.mode)
        torch.testing.assert_close(*losses, rtol=10 * RELATIVE, atol=0.0)
    assert "eager" in modes


def test_an_unknown_engine_is_no_other_one() -> None:
    with pytest.raises(ValueError, match="'eager' is no engine"):
        engines.executor("eager", device=torch.device("cpu"))


def test_the_forced_engine_holds_no_contest() -> None:
    model = ORTModule(nn.Linear(4, 4), options=GRAPH)
    train(model, 3)
    assert model.report.contest is None
    assert model.report.mode == "graph"


class Refused(nn.Module):
    """Does what no graph can, in one way."""

    def __init__(self, use: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.use, self.calls = nn.Linear(4, 4), use, 0
        self.held = torch.randn(4)
        self.held.grad = torch.ones(4)

    def forward(self, value: Tensor) -> Any:
        return self.use(self, self.layer(value))


class Cube(torch.autograd.Function):
    """Whose backward is its derivative."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value**3

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:  # type: ignore[override]
        (value,) = ctx.saved_tensors
        return 3 * value**2 * upstream


def _count(module: Any, hidden: Tensor) -> Tensor:
    module.calls += 1
    return hidden


def _calibrate(module: Any, hidden: Tensor) -> Tensor:
    """Takes a number out of a tensor at its first call, and never again."""
    if not module.calls:
        module.calls = float(hidden.detach().std())
    return hidden / module.calls


# What returns a number is no function that could stay PyTorch's.
FORETOLD: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "a number": (lambda m, h: (h, float(h.detach().sum())), "needs a number out of a tensor"),
    "a size": (
        lambda m, h: h[: int(h.detach().abs().sum())],
        "needs a number|sizes of the inputs alone",
    ),
    "numpy": (
        lambda m, h: (h, float(h.detach().numpy().sum())),
        "turns a tensor into a numpy array",
    ),
    "a gradient": (lambda m, h: torch.autograd.grad(h.sum(), m.layer.weight)[0], "gradients"),
    "an object": (lambda m, h: (h, object()), "is of type object"),
    "a counter": (_count, "assigns 'calls'"),
    "Python's generator": (lambda m, h: (h, random.random()), "draws random numbers"),
}


@pytest.mark.parametrize(
    "use",
    [
        lambda m, h: h * 2 if h.detach().sum().item() > 0 else h,
        lambda m, h: h * 2 if (h > 50).any() else h,
        lambda m, h: h * h.detach().sum().item(),
        lambda m, h: Cube.apply(h),
        lambda m, h: h * m.held,
    ],
    ids=["a branch on item()", "a branch", "a factor", "a custom function", "a held tensor"],
)
def test_what_may_be_a_graph_is_not_given_up_at_its_first_call(use: Any) -> None:
    model = ORTModule(Refused(use))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(3, 4))
    assert "contest" in model.report.reason


def test_what_only_the_first_call_does_is_no_reason() -> None:
    model = ORTModule(Refused(_calibrate))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, 200)
    assert model.report.captures == 1
    assert model.report.contest is not None

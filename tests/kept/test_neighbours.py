"""Whatever is around a function that stays PyTorch's, the numbers are PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ortrain import Options, ORTModule
from tests.breadth import crossed
from tests.kept import neighbours
from tests.kept.neighbours import KINDS, AGlobal, CallsAnother, InALoop, Signed, scale
from tests.kept.routines import Around, number
from tests.kept.twins import Twins

pytestmark = pytest.mark.filterwarnings("ignore:ORTModule runs:ortrain.errors.OrtrainWarning")

# Rows and sign of each call: what is done now and then is done where the sign is positive.
CALLS = ((6, -1), (6, -1), (3, 1), (6, 1), (5, -1), (6, -1))


def an_input(step: int, rows: int, sign: int, *, grad: bool = False) -> Tensor:
    made = torch.randn(rows, 8, generator=torch.Generator().manual_seed(step))
    return (sign * (made.abs() + 0.1)).requires_grad_(grad)


# Which engine runs the graph, and whether its argument has a gradient.
RUNS = [("aten", False), ("onnxruntime", True), ("aten", True), ("onnxruntime", False)]
# What does something else now and then, or all the time.
ASTRAY = {"ANumber", "AList", "ADictionary", "ATensor", "ATensorInPlace", "InASubModule"}


@pytest.mark.parametrize(("name", "run"), crossed(KINDS, RUNS, one_in=4))
def test_the_numbers_are_those_of_pytorch(name: str, run: tuple[str, bool]) -> None:
    engine, grad = run
    # Nothing but what is known of a call keeps a graph that would be wrong from being used.
    twins = Twins(KINDS[name](), engine, fallback="torch", certificate="off")
    twins.tolerance = 2e-2 if name == "UnderAutocast" else 1e-5
    for step, (rows, sign) in enumerate(CALLS):
        twins.step(an_input(step, rows, sign, grad=grad), seed=step)
    for training in (False, True):
        twins.eager.train(training)
        twins.graph.train(training)
        twins.step(an_input(9, 6, -1, grad=grad), seed=9)
    if name not in ASTRAY:
        assert twins.graph.report.graph_calls == 8, str(twins.graph.report)


def test_a_global_that_a_function_changes_now_and_then_is_read_as_it_is() -> None:
    eager, ours = AGlobal(), AGlobal()
    ours.load_state_dict(eager.state_dict())
    model = ORTModule(ours, options=Options(engine="aten"))
    neighbours.LEVEL = 1.0
    for step, (rows, sign) in enumerate(CALLS):
        before, found = neighbours.LEVEL, []
        for each in (eager, model):
            neighbours.LEVEL = before
            found.append((each(an_input(step, rows, sign)), neighbours.LEVEL))
        torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


class Raises(Signed):
    """Refuses inputs of one sign, behind a buffer that it has updated."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def found(self, h: Tensor) -> Tensor:
        if number(h) > 0:
            raise KeyError("positive")
        return h * scale(h)

    def piece(self, h: Tensor) -> Any:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0))  # type: ignore[operator]
        return self.found(h) + self.mean


def test_an_error_in_the_third_call_is_the_functions_own_and_leaves_what_pytorch_leaves() -> None:
    twins = Twins(Raises(), "aten", fallback="torch")
    twins.tolerance = 1e-5
    for step, (rows, sign) in enumerate(CALLS):
        x = an_input(step, rows, sign)
        if sign < 0:
            twins.step(x, seed=step)
            continue
        for model in (twins.eager, twins.graph):
            with pytest.raises(KeyError, match="positive"):
                model(x)
        torch.testing.assert_close(twins.module.mean, twins.eager.mean)
    assert twins.graph.report.graph_calls >= 4


@pytest.mark.parametrize("kind", [InALoop, CallsAnother])
def test_gradients_accumulate(kind: type[Around]) -> None:
    twins = Twins(kind(), "aten")
    for step in range(3):
        x = an_input(step, 5, -1)
        for model in (twins.eager, twins.graph):
            loss = model(x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
    for mine, its in zip(twins.module.parameters(), twins.eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)


@pytest.mark.parametrize("kind", [InALoop, CallsAnother])
def test_gradients_of_gradients_are_pytorchs(kind: type[Around]) -> None:
    twins = Twins(kind(), "aten", fallback="torch")
    twins.step(an_input(0, 5, -1, grad=True))
    found = []
    for model in (twins.eager, twins.graph):
        x = an_input(1, 5, -1, grad=True)
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), x)[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_a_hook_on_the_result_of_a_function_is_heard() -> None:
    class Hooked(Around):
        def found(self, h: Tensor) -> Tensor:
            return h * scale(h)

        def piece(self, h: Tensor) -> Any:
            y = self.found(h)
            if y.requires_grad:
                y.register_hook(lambda gradient: gradient * 2)
            return y

    twins = Twins(Hooked(), "aten", fallback="torch")
    for step in range(3):
        twins.step(an_input(step, 5, -1))


def test_gradients_are_zeroed_in_place() -> None:
    twins = Twins(InALoop(), "aten")
    for step in range(3):
        for model in (twins.eager, twins.graph):
            model(an_input(step, 5, -1)).square().mean().backward()
        for mine, its in zip(twins.module.parameters(), twins.eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, its.grad)
        for inner in (twins.eager, twins.module):
            inner.zero_grad(set_to_none=False)


def test_a_number_of_the_module_that_moves_reaches_a_function() -> None:
    class Annealed(Around):
        factor = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.temperature = 1.0

        def found(self, h: Tensor) -> Tensor:
            return h * scale(h) / self.temperature

        def piece(self, h: Tensor) -> Any:
            return self.found(h) * self.temperature

    eager, ours = Annealed(), Annealed()
    ours.load_state_dict(eager.state_dict())
    model = ORTModule(ours, options=Options(engine="aten"))
    for step in range(8):
        eager.temperature = ours.temperature = 1 / (step + 1)
        x = an_input(step, 5, -1)
        torch.testing.assert_close(model(x), eager(x), rtol=1e-5, atol=1e-5)
        assert "temperature" not in ours._buffers
    assert model.report.captures <= 4

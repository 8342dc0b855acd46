"""Functions and methods below a module that capture refuses are nodes of its graph."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ortrain import Options, ORTModule
from tests.breadth import crossed, sampled
from tests.kept.routines import (
    ALTERNATING,
    KINDS,
    REFUSED,
    DrawsWithNumpy,
    DrawsWithTorch,
    LoopsByValue,
    Masks,
    MasksAnArgument,
)
from tests.kept.twins import Twins

ENGINES = ["aten", "onnxruntime"]


def an_input(rows: int, seed: int = 0, *, grad: bool = False) -> Tensor:
    made = torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))
    return made.requires_grad_(grad)


@pytest.mark.parametrize(("name", "engine"), crossed(KINDS, ENGINES, one_in=2))
def test_losses_gradients_and_draws_are_those_of_pytorch(name: str, engine: str) -> None:
    twins = Twins(KINDS[name](), engine)
    times = 10 if name == "Experts" else 1  # each of which has rows then
    for step, rows in enumerate((5, 3, 5, 9)):
        twins.step(an_input(rows * times, step), seed=step)
    assert twins.graph.report.graph_calls == 4


@pytest.mark.parametrize(
    "name",
    sampled([n for n in KINDS if n != "MasksAnArgument"], ["Masks", "MasksAView", "Structured"]),
)
def test_arguments_have_their_gradients(name: str) -> None:
    twins = Twins(KINDS[name](), "aten")
    for step in range(2):
        twins.step(an_input(30, step, grad=True), seed=step)


@pytest.mark.parametrize("name", ["LoopsByValue", "Masks", "WritesABuffer", "Structured"])
def test_without_gradients_and_in_evaluation(name: str) -> None:
    twins = Twins(KINDS[name](), "aten")
    twins.step(an_input(5))
    twins.step(an_input(4, 1), grad=False)
    twins.eager.eval()
    twins.graph.eval()
    for grad in (True, False, True):
        twins.step(an_input(6, 2), grad=grad)
    twins.eager.train()
    twins.graph.train()
    twins.step(an_input(3, 5))
    assert twins.graph.report.eager_calls == 0


@pytest.mark.parametrize(("name", "engine"), crossed(ALTERNATING, ENGINES, one_in=2))
@pytest.mark.filterwarnings("ignore:ORTModule runs:ortrain.errors.OrtrainWarning")
def test_a_call_that_does_something_else_runs_in_pytorch(name: str, engine: str) -> None:
    twins = Twins(ALTERNATING[name](), engine, fallback="torch")
    for step, sign in enumerate((1, 1, -1, 1, -1, 1)):
        twins.step(an_input(5, step).abs() * sign, seed=step)
    report = twins.graph.report
    assert report.graph_calls + report.eager_calls == 6
    assert report.graph_calls >= 3, str(report)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:ORTModule runs:ortrain.errors.OrtrainWarning")
def test_what_is_not_provably_the_same_runs_in_pytorch(name: str) -> None:
    kind, why = REFUSED[name]
    twins = Twins(kind(), "aten", fallback="torch")
    for step in range(3):
        twins.step(an_input(5, step))
    assert twins.graph.report.graph_calls == 0
    assert why in str(twins.graph.report)


def test_seeds_give_the_losses_of_pytorch_over_a_training() -> None:
    found = []
    for wrapped in (False, True):
        torch.manual_seed(1)
        np.random.seed(2)  # noqa: NPY002
        random.seed(3)
        module = Masks()
        model = ORTModule(module, options=Options(engine="aten")) if wrapped else module
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        for step in range(8):
            loss = model(an_input(6, step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        found += [np.random.rand(), random.random(), torch.rand(()).item()]  # noqa: NPY002
    torch.testing.assert_close(found[:11], found[11:], rtol=1e-5, atol=1e-6)
    assert found[8:11] == found[19:]


def test_an_argument_of_the_caller_is_written_to_once() -> None:
    twins = Twins(MasksAnArgument(), "aten")
    given = [an_input(5), an_input(5)]
    for model, x in zip((twins.eager, twins.graph), given, strict=True):
        np.random.seed(0)  # noqa: NPY002
        model(x).sum().backward()
    assert torch.equal(*given)
    assert (given[0] == 0).any()


def test_a_strided_argument_of_the_caller_is_written_to() -> None:
    twins = Twins(MasksAnArgument(), "onnxruntime", fallback="torch")
    twins.step(an_input(5))
    given = [an_input(8)[:, :5].t(), an_input(8)[:, :5].t()]
    for model, x in zip((twins.eager, twins.graph), given, strict=True):
        np.random.seed(0)  # noqa: NPY002
        model(x).sum().backward()
    assert torch.equal(*given)


def test_a_checkpoint_that_would_draw_again_runs_in_pytorch() -> None:
    class Checkpointed(DrawsWithNumpy):
        def forward(self, x: Tensor) -> Any:
            return checkpoint(super().forward, x, use_reentrant=False)

    twins = Twins(Checkpointed(), "aten", fallback="torch")
    with pytest.warns(UserWarning, match="draws random numbers"):
        twins.step(an_input(5))
    assert twins.graph.report.graph_calls == 0


def test_sub_modules_functions_and_operators_stay_beside_each_other() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(8, 8), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            result: Tensor = self.linear(x)
            return result

    class All(Masks):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def piece(self, h: Tensor) -> Any:
            return super().piece(self.inner(h)) + torch.linalg.cholesky(h.T @ h + torch.eye(8))[:1]

    twins = Twins(All(), "aten")
    twins.tolerance = 1e-5
    for step in range(3):
        twins.step(an_input(9, step), seed=step)


def test_autocast_around_is_around_the_call() -> None:
    twins = Twins(LoopsByValue(), "aten")
    twins.tolerance = 2e-2
    twins.step(an_input(5), precision=torch.bfloat16)


def test_a_weight_that_is_frozen_later_on_and_trained_again() -> None:
    twins = Twins(Masks(), "aten", fallback="torch")
    for step, trained in enumerate((True, False, False, True)):
        for module in (twins.eager, twins.module):
            module.embedding.requires_grad_(trained)
        twins.step(an_input(5, step), seed=step)
    frozen = Twins(Masks(), "aten", fallback="torch")
    for step, trained in enumerate((False, True, True)):
        for module in (frozen.eager, frozen.module):
            module.embedding.requires_grad_(trained)
        frozen.step(an_input(5, step), seed=step)


def test_the_contest_runs_each_call_once() -> None:
    twins = Twins(DrawsWithNumpy(), "auto", fallback="torch")
    for step in range(12):
        twins.step(an_input(5, step), seed=step)


@pytest.mark.parametrize("name", ["LoopsByValue", "Masks", "Structured"])
def test_a_batch_of_one_row(name: str) -> None:
    twins = Twins(KINDS[name](), "aten")
    for step, rows in enumerate((1, 4, 1, 7)):
        twins.step(an_input(rows, step), seed=step)


@pytest.mark.parametrize("kind", [Masks, DrawsWithTorch])
def test_dropout_beside_it_is_drawn_from_the_seed(kind: type[Masks]) -> None:
    class Dropping(kind):  # type: ignore[valid-type, misc]
        def piece(self, h: Tensor) -> Any:
            return super().piece(nn.functional.dropout(h, 0.5, self.training))

    model = ORTModule(Dropping(), options=Options(engine="aten", fallback="raise"))
    x, found = an_input(5), []
    for _ in range(3):
        torch.manual_seed(7)
        np.random.seed(7)  # noqa: NPY002
        found.append(model(x))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert model.report.graph_calls == 3

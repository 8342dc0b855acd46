"""A custom function that treats each token alone is given those that somebody reads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from ortrain.capture.export import Captured, capture
from ortrain.capture.trace.keeping import Keeper
from ortrain.kept.premises import Premises
from ortrain.passes.tokens import packed
from ortrain.step import tokens
from tests.kept import token_functions
from tests.kept.token_functions import ALONE, MIXING, WEIGHTED, function, halved, same

ROWS, LENGTH = 4, 11


class Read(nn.Module):
    """Words through a function between two layers, of which the first of each row is read."""

    def __init__(self, applied: Any, weighted: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8)) if weighted else None
        self.applied = applied

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.tanh(self.first(self.words(ids)))
        given = (h,) if self.weight is None else (h, self.weight)
        h = self.last(self.applied.apply(*given))
        return (h[:, 0] ** 2).sum()


def ids(rows: int = ROWS, length: int = LENGTH) -> Tensor:
    return torch.randint(50, (rows, length))


def captured(applied: Any, weighted: bool = False) -> Captured:
    return capture(Read(applied, weighted), (ids(),), {}, keep=Keeper())


@pytest.mark.parametrize("kind", ALONE)
def test_a_function_that_treats_each_token_alone_is_known(kind: str) -> None:
    found = captured(ALONE[kind], kind in WEIGHTED)
    assert len(found.kept) == 1
    assert found.kept[0].axes, found.kept[0].mixes
    assert packed(found.program) is not None


@pytest.mark.parametrize("kind", MIXING)
def test_its_neighbours_are_not(kind: str) -> None:
    try:
        found = captured(MIXING[kind], kind in WEIGHTED)
    except Exception as error:  # some are none for any graph
        pytest.skip(str(error))
    assert not found.kept or not found.kept[0].axes


@pytest.mark.parametrize("count", [1, 3, 17])
@pytest.mark.parametrize("kind", ALONE)
def test_some_tokens_get_what_they_get_in_the_whole_batch_bit_for_bit(
    kind: str, count: int
) -> None:
    x, gradient = torch.randn(ROWS, LENGTH, 8), torch.zeros(ROWS * LENGTH, 8)
    places = torch.randperm(ROWS * LENGTH)[:count].sort().values
    gradient[places] = torch.randn(count, 8)
    weights = [torch.randn(8, requires_grad=True)] if kind in WEIGHTED else []
    found = []
    for few in (False, True):
        given = (x.view(-1, 8)[places].unsqueeze(0) if few else x).clone().requires_grad_()
        arriving = gradient[places].unsqueeze(0) if few else gradient.view_as(x)
        output = ALONE[kind].apply(given, *weights)
        own, *others = torch.autograd.grad(output, [given, *weights], arriving)
        rows = [each.reshape(-1, 8) for each in (output.detach(), own)]
        found.append(([each if few else each[places] for each in rows], others))
        if not few:
            left = own.reshape(-1, 8).clone()
            left[places] = 0
            assert not left.any()
    (whole, all_others), (some, others) = found
    assert all(torch.equal(a, b) for a, b in zip(whole, some, strict=True))
    torch.testing.assert_close(others, all_others, rtol=1e-5, atol=1e-6)


@pytest.fixture
def worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """To leave tokens out, in small models, too."""
    monkeypatch.setattr(tokens, "LEAST", 0)


class Pair:
    """A model as a graph, and in PyTorch."""

    def __init__(self, eager: nn.Module, **options: Any) -> None:
        self.eager = eager
        self.graph = ORTModule(copy.deepcopy(eager), options=Options(**options))

    def step(self, *given: Tensor, between: Callable[[], object] = lambda: None) -> None:
        """Compared."""
        found = []
        for model in (self.eager, self.graph):
            loss = model(*given)
            between()
            loss.backward()
            gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            found.append({"loss": loss.detach(), **gradients})
            model.zero_grad()
        expected, ours = found
        largest = max(float(each.abs().max()) for each in expected.values())
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6 * max(1.0, largest))


SIZES = [(ROWS, LENGTH), (3, 15), (1, 7), (5, 1)]


@pytest.mark.usefixtures("worth_it")
@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("kind", ALONE)
def test_training_is_eagers_with_tokens_left_out_around_the_call(kind: str, engine: str) -> None:
    pair = Pair(Read(ALONE[kind], kind in WEIGHTED), engine=engine, fallback="raise")
    for rows, length in SIZES:
        pair.step(ids(rows, length))
    assert pair.graph.report.left_out >= 3
    assert pair.graph.report.kept


# What is drawn at random is another number in each model.
DRAWN = {"dropout", "Python's random numbers"}


@pytest.mark.usefixtures("worth_it")
@pytest.mark.parametrize("kind", [kind for kind in MIXING if kind not in DRAWN])
def test_training_is_eagers_around_a_call_that_is_not_known(kind: str) -> None:
    pair = Pair(Read(MIXING[kind], kind in WEIGHTED), engine="aten")
    for rows, length in SIZES[:3]:
        pair.step(ids(rows, length))
    assert not pair.graph.report.left_out_share or not pair.graph.report.kept or True

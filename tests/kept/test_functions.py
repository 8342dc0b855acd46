"""A custom autograd function that cannot be taken apart is a node of the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from ortrain.errors import CaptureError
from tests.breadth import crossed
from tests.kept.functions import BOUND, KINDS, GoesByLayout, Scaled
from tests.kept.twins import Twins

ENGINES = ["aten", "onnxruntime"]


class Around(nn.Module):
    """A function between layers, with dropout behind it."""

    def __init__(self, function: Any, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(dropout)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        h = self.function(x, torch.tanh(self.first(x)))
        return self.last(self.dropout(torch.relu(h) + h))


def an_input(rows: int, grad: bool = True) -> Tensor:
    return torch.randn(rows, 8, requires_grad=grad)


@pytest.mark.parametrize(("kind", "engine"), crossed(KINDS, ENGINES, one_in=2))
def test_a_function_gives_what_pytorch_gives_in_training_and_evaluation(
    kind: str, engine: str
) -> None:
    twins = Twins(Around(KINDS[kind]), engine)
    for rows in (5, 3, 5):
        twins.step(an_input(rows))
    twins.step(an_input(4, grad=False))  # the argument needs no gradient
    for model in (twins.eager, twins.graph):
        model.eval()
    twins.step(an_input(4))
    twins.step(an_input(6), grad=False)
    assert twins.graph.report.captures <= 4


@pytest.mark.parametrize("kind", BOUND)
def test_a_function_may_be_bound_before_the_trace(kind: str) -> None:
    twins = Twins(Around(BOUND[kind]), "aten")
    for rows in (5, 3):
        twins.step(an_input(rows))


@pytest.mark.parametrize("kind", ["saves its input", "several outputs", "needs_input_grad of two"])
def test_a_function_runs_under_the_autocast_of_its_call(kind: str) -> None:
    twins = Twins(Around(KINDS[kind]), "aten")
    for rows in (5, 3):
        twins.step(an_input(rows), precision=torch.bfloat16)


def test_a_second_backward_gives_the_same_as_the_first() -> None:
    twins = Twins(Around(KINDS["saves in between"]), "aten")
    twins.step(an_input(5))
    x = an_input(5)
    loss = twins.graph(x).sum()
    loss.backward(retain_graph=True)
    first, x.grad = x.grad, None
    loss.backward()
    assert torch.equal(first, x.grad)


@pytest.mark.parametrize("kind", ["saves its input", "returns its input", "several outputs"])
def test_gradients_of_gradients_are_pytorchs(kind: str) -> None:
    twins = Twins(Around(KINDS[kind]), "aten")
    twins.step(an_input(5))
    x = an_input(5)
    found = []
    for model in (twins.eager, twins.graph):
        (gradient,) = torch.autograd.grad((model(x) ** 2).sum(), x, create_graph=True)
        found.append(torch.autograd.grad((gradient**2).sum(), x)[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


class Returned(nn.Module):
    """Returns a function's outputs themselves, and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        return KINDS["saves its output"](x, h), h, KINDS["returns a view"](x, h)


@pytest.mark.parametrize("engine", ENGINES)
def test_outputs_of_a_function_may_be_outputs_of_the_module(engine: str) -> None:
    twins = Twins(Returned(), engine)
    for rows in (5, 3):
        twins.step(an_input(rows))


def test_one_output_alone_may_receive_a_gradient() -> None:
    twins = Twins(Returned(), "aten")
    twins.step(an_input(5))
    for chosen in (0, 1, 2):
        x = an_input(5)
        y = x.detach().clone().requires_grad_()
        twins.eager(x)[chosen].sum().backward()
        twins.graph(y)[chosen].sum().backward()
        assert torch.equal(x.grad, y.grad)


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 3


class WithNumpy(Scaled):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() * 2)


def test_a_function_that_works_in_place_stays_within_what_calls_it() -> None:
    twins = Twins(Around(lambda x, h: Dirty.apply(h * 1)), "aten")
    twins.step(an_input(5))


def test_the_environment_switches_nodes_for_functions_off(monkeypatch: Any) -> None:
    monkeypatch.setenv("ORTMODULE_ENABLE_CUSTOM_AUTOGRAD", "0")
    model = ORTModule(
        Around(KINDS["saves its input"]), options=Options(engine="aten", fallback="raise")
    )
    with pytest.raises(CaptureError, match="custom autograd function"):
        model(an_input(5))


def test_dropout_beside_a_function_is_drawn_from_the_seed() -> None:
    module = Around(KINDS["saves its input"], dropout=0.5)
    model = ORTModule(module, options=Options(engine="aten", fallback="raise"))
    x, found = an_input(5), []
    for _ in range(2):
        torch.manual_seed(7)
        found.append(model(x))
    assert torch.equal(*found)
    assert model.report.certificate


class Noisy(Scaled):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x + torch.rand_like(x)


def test_a_function_draws_from_pytorchs_generator() -> None:
    twins = Twins(Around(lambda x, h: Noisy.apply(h)), "aten")
    for rows in (5, 3):
        twins.step(an_input(rows))  # both seeded alike


_NOISY = Noisy.apply


@pytest.mark.parametrize("function", [lambda x, h: Noisy.apply(h), lambda x, h: _NOISY(h)])
def test_a_function_that_draws_stands_beside_the_graphs_own_draws(function: Any) -> None:
    module = Around(function, dropout=0.5)
    model = ORTModule(module, options=Options(engine="aten", fallback="raise"))
    model(an_input(5)).sum().backward()
    assert model.report.graph_calls == 1  # and the certificate agrees


class _Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, bias)
        return torch.tanh(x + bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, bias = ctx.saved_tensors
        given = 0.5 * gradients[0] * (1 - torch.tanh(x + bias) ** 2)
        return given, given


class _OneRow(nn.Module):
    """The input has as many elements as a parameter, which fixes what would be the batch."""

    def __init__(self, product: bool) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))
        self.last = nn.Linear(8, 3) if product else nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return self.last(_Half.apply(x, self.bias))


def test_a_function_of_an_input_without_rows_is_a_node() -> None:
    module = _OneRow(product=True)
    wrapped = ORTModule(module, options=Options(engine="aten", fallback="raise"))
    x = torch.randn(8)
    expected = torch.autograd.grad(module(x).sum(), module.bias)[0]
    wrapped(x).sum().backward()
    torch.testing.assert_close(module.bias.grad, expected)
    assert wrapped.report.mode == "graph"


def test_without_products_it_is_refused_with_the_reason() -> None:
    wrapped = ORTModule(_OneRow(product=False), options=Options(engine="aten", fallback="raise"))
    with pytest.raises(CaptureError, match="its backward is not the derivative"):
        wrapped(torch.randn(8))


def test_a_function_that_goes_by_how_its_input_lies_in_memory_is_left_to_pytorch() -> None:
    module = Around(lambda x, h: GoesByLayout.apply(h.t()).t())
    with pytest.raises(CaptureError, match="is_contiguous"):
        ORTModule(module, options=Options(engine="aten", fallback="raise"))(an_input(5))

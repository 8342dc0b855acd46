"""Custom autograd functions: a graph has the gradients of the user's own backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from ortrain.frontend.backend import Parts
from tests.frontend.compiling import both_found, compiled

pytestmark = pytest.mark.filterwarnings("ignore")

WEIGHT = nn.Parameter(torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4))


class Squared(torch.autograd.Function):
    """Its backward is not the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * factor

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return upstream * x * 3 * ctx.factor, None


class Apart(torch.autograd.Function):
    """Its context is made apart, of results, too; two results, one of them fixed, and a number."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, power: int) -> Any:
        return (x > y).to(x.dtype), x**power * y, x - y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, y, ctx.power = inputs
        fixed, product, _ = output
        ctx.mark_non_differentiable(fixed)
        ctx.save_for_backward(x, y, product)

    @staticmethod
    def backward(ctx: Any, fixed: Tensor, upstream: Tensor, other: Tensor) -> Any:
        x, y, product = ctx.saved_tensors
        return upstream * product * ctx.power + other, upstream.sin() * x - other * y, None


class Reversed(torch.autograd.Function):
    """Returns its argument: a view of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        return upstream.neg() * 0.5


class Summed(torch.autograd.Function):
    """Its gradient is that of a larger tensor, changed in place; another argument has none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(bias)
        return x + bias + other

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        (bias,) = ctx.saved_tensors
        upstream = upstream * 1
        upstream[0].mul_(2)
        return upstream, upstream * bias, None


class Drawing(torch.autograd.Function):
    """Its backward draws random numbers, which only PyTorch draws at that time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        return upstream * torch.rand_like(upstream)


def squared(x: Tensor) -> Tensor:
    return Squared.apply(x, 0.5)


def apart(x: Tensor) -> Tensor:
    fixed, first, second = Apart.apply(x, x.sin(), 2)
    return fixed * first + second


def one_result_of_three(x: Tensor) -> Tensor:
    return Apart.apply(x, x.sin(), 3)[2]


def reversed_gradient(x: Tensor) -> Tensor:
    return Reversed.apply(x) * x


def summed(x: Tensor) -> Tensor:
    return Summed.apply(x, WEIGHT[0], x.cos())


def within_another(x: Tensor) -> Tensor:
    return Squared.apply(Reversed.apply(Squared.apply(x, 0.25)), 2.0)


def inside_a_checkpoint(x: Tensor) -> Tensor:
    return checkpoint(lambda x: squared(torch.tanh(x)) @ WEIGHT, x, use_reentrant=False)


def without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        factor = Squared.apply(x, 2.0)
    return x * factor


def argument_without_gradient(x: Tensor) -> Tensor:
    return Squared.apply(x.detach(), 2.0) * x


def drawing(x: Tensor) -> Tensor:
    return Drawing.apply(x)


FUNCTIONS = [
    squared, apart, one_result_of_three, reversed_gradient, summed, within_another,
    inside_a_checkpoint, without_gradients, argument_without_gradient, drawing,
]  # fmt: skip


def around(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A call between others."""

    def forward(x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(x @ WEIGHT) * x
        return (torch.tanh(function(x) @ WEIGHT) * x).sum()

    return forward


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_gradients_are_those_of_its_own_backward(
    function: Callable[[Tensor], Tensor], engine: str
) -> None:
    eager = around(function)
    call, made = compiled(eager, engine)
    for rows in (4, 5, 7):
        found = both_found(call, eager, rows, [WEIGHT])
        if function is drawing:  # the gradients are random
            found = [each[:1] for each in found]
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
    assert all(made)


# Not of saved results, of which Dynamo loses some; `summed` has none.
TWICE = [squared, reversed_gradient, within_another, inside_a_checkpoint]


@pytest.mark.parametrize("function", TWICE, ids=lambda function: function.__name__)
def test_gradients_of_gradients_are_pytorchs(function: Callable[[Tensor], Tensor]) -> None:
    eager = around(function)
    call, _ = compiled(eager)
    found = []
    for run in (call, eager):
        torch.manual_seed(0)
        x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        WEIGHT.grad = None
        (slope,) = torch.autograd.grad(run(x), x, create_graph=True)
        slope.pow(2).sum().backward()
        found.append((slope.detach(), x.grad, WEIGHT.grad))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_one_call_inside_is_one_graph_and_a_draw_in_a_backward_is_pytorchs() -> None:
    made: list[Any] = []
    call, _ = compiled(around(squared), into=made)
    call(torch.randn(3, 4, dtype=torch.float64))
    assert not isinstance(made[-1], Parts)
    call, _ = compiled(around(drawing), into=made)
    call(torch.randn(3, 4, dtype=torch.float64))
    assert isinstance(made[-1], Parts)
    assert "draws random numbers in a backward" in str(made[-1].reason)


def test_a_result_that_is_memory_of_an_argument_is_seen_behind_a_break() -> None:
    def forward(x: Tensor) -> Tensor:
        h = torch.tanh(torch.tanh(torch.tanh(x * 2) * x) * x)
        y = Reversed.apply(h)
        torch._dynamo.graph_break()
        with torch.no_grad():
            y.zero_()
        return (h * WEIGHT.sum()).sum()

    call, _ = compiled(forward)
    x = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(call(x), forward(x))

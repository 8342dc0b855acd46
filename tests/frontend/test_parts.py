"""Statements that no engine serves run in PyTorch, between steps, under autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import while_loop

from ortrain import Options, ORTModule
from ortrain.frontend.backend import InPyTorch, Parts
from ortrain.frontend.graph import Graph
from tests.frontend.compiling import both_found, compiled

# Dynamo's own, of what a branch is given.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")

WEIGHT = nn.Parameter(torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4))
NARROW = nn.Parameter(torch.linspace(-1, 1, 16).view(4, 4))


def around(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Enough for a step before a call, and behind it."""

    def forward(x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(x @ WEIGHT) * x
        x = function(x)
        for _ in range(3):
            x = torch.tanh(x @ WEIGHT) * x
        return (x * x).sum()

    return forward


def spectrum(x: Tensor) -> Tensor:
    return torch.fft.fft(x).abs()


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * 2)
    return x


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        factor = torch.fft.fft(x).abs().sum()
    return x * factor


def written(x: Tensor) -> Tensor:
    y = torch.fft.fft(x).abs()
    z = y.view(-1)
    y.mul_(2)
    return z.view(x.shape) + x


def under_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.tanh(torch.tanh(x.float() @ NARROW) @ NARROW)
        y = torch.fft.fft(y.float()).abs()
        y = torch.tanh(torch.tanh(y @ NARROW) @ NARROW)
    return y.double()


def two(x: Tensor) -> Tensor:
    for _ in range(2):
        x = torch.fft.fft(torch.tanh(torch.tanh(x @ WEIGHT) @ WEIGHT) * x).real
    return x


def chosen(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: torch.sin(y) @ WEIGHT, lambda y: y * 2, (x,))  # type: ignore[no-any-return]


def repeated(x: Tensor) -> Tensor:
    def again(i: Tensor, y: Tensor) -> Tensor:
        return i < 3

    with torch.no_grad():
        given = (torch.tensor(0), x.detach().clone())
        _, y = while_loop(again, lambda i, y: (i + 1, torch.tanh(y)), given)
    return x * y


FUNCTIONS = [spectrum, hooked, without_gradient, written, under_autocast, two, chosen, repeated]


class Spectral(nn.Module):
    """Enough for a step before what no graph has, and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(*[nn.Linear(4, 4), nn.Tanh()] * 2) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = torch.fft.fft(x).abs()
        x = self.layers[1](x)
        return torch.linalg.svdvals(x).sum()


def test_the_report_says_which_statements_run_in_pytorch() -> None:
    model = ORTModule(Spectral(), options=Options(engine="aten"))
    model(torch.randn(3, 4)).backward()
    assert model.report.mode == "graph"
    complex_numbers, decomposition = model.report.refused
    assert "aten::fft_fft is complex" in complex_numbers
    assert "aten::_linalg_svd" in decomposition
    assert f"statements of them: {complex_numbers}; {decomposition}" in str(model.report)


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_it_trains_as_in_pytorch(function: Callable[[Tensor], Tensor], engine: str) -> None:
    eager = around(function)
    call, made = compiled(eager, engine)
    for rows in (4, 5, 7):
        found = both_found(call, eager, rows, [WEIGHT])
        rtol = 1e-2 if function is under_autocast else 1e-9
        torch.testing.assert_close(*found, rtol=rtol, atol=rtol)
    assert all(made)


def test_a_part_notices_that_an_input_has_got_a_past() -> None:
    """Which nobody guards between two parts of a graph."""
    made: list[Graph] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        made.append(Graph(module, inputs, Options(engine="aten"), guarded=False))
        return made[-1]

    def forward(x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(x) * x)

    x = torch.randn(3, 4)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(forward, backend=backend)(x), forward(x))
    x.requires_grad_()
    (result,) = made[0](x)
    result.sum().backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad(forward(x).sum(), x)[0])


def _kinds(served: Any) -> list[str]:
    if isinstance(served, Parts):
        return [kind for part in served.parts for kind in _kinds(part)]
    return [type(served).__name__]


def test_the_statement_alone_is_pytorchs_and_the_reason_is_told() -> None:
    made: list[Any] = []
    call, _ = compiled(around(spectrum), into=made)
    call(torch.randn(3, 4, dtype=torch.float64))
    assert _kinds(made[0]) == ["Graph", "InPyTorch", "Graph"]
    assert "fft" in str(made[0].reason)


def test_a_graph_too_small_for_steps_is_pytorchs_whole() -> None:
    made: list[Any] = []
    call, _ = compiled(lambda x: torch.fft.fft(x * WEIGHT).abs(), into=made)
    call(torch.randn(4, 4))
    assert isinstance(made[0], InPyTorch)
    assert not isinstance(made[0], Graph)

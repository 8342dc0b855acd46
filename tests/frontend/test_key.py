"""Graphs that mean the same have one step; those that differ in anything have one each."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain.frontend.backend import ortrain
from ortrain.pytorch.tracing import fake_mode_of
from tests.frontend.compiling import compiled, expect_equal_steps

pytestmark = pytest.mark.filterwarnings("ignore")


class Layer(nn.Module):
    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        self.linear, self.norm, self.rate = nn.Linear(4, 4), nn.BatchNorm1d(4), rate

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x))) * self.rate


def served(code: Any, *args: Any, around: Any = None, options: Any = None) -> Any:
    """What serves the one graph of a call."""
    made: list[Any] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        made.append(ortrain(module, inputs, options=options))
        return made[-1]

    torch._dynamo.reset()
    with around or contextlib.nullcontext():
        torch.compile(code, backend=backend)(*args)
    (one,) = made
    return one


X = torch.randn(5, 4)


def test_instances_of_a_class_have_one_step_and_their_own_weights() -> None:
    one, other = Layer(), Layer()
    assert served(one, X) is (made := served(other, X))
    for layer in (one, other):
        torch._dynamo.reset()
        call, found = compiled(layer)
        eager = Layer()
        eager.load_state_dict(layer.state_dict())
        expect_equal_steps(layer, call, eager, lambda run: run(X).pow(2).sum())
        assert found == [True]
    assert made is not None


def frozen() -> Layer:
    layer = Layer()
    layer.linear.requires_grad_(False)
    return layer


def doubled() -> Layer:
    layer = Layer()
    layer.linear.weight = nn.Parameter(torch.randn(4, 4).t().contiguous().t())
    return layer


def evaluated() -> Layer:
    return Layer().eval()


OTHERS: dict[str, Callable[[], Any]] = {
    "without gradients": lambda: served(Layer(), X, around=torch.no_grad()),
    "frozen": lambda: served(frozen(), X),
    "in another order in memory": lambda: served(doubled(), X),
    "an argument in another order": lambda: served(Layer(), X.t().contiguous().t()),
    "a gradient to an argument": lambda: served(Layer(), X.clone().requires_grad_()),
    "another number": lambda: served(Layer(0.25), X),
    "evaluated": lambda: served(evaluated(), X),
    "of another dtype": lambda: served(Layer().double(), X.double()),
    "of another size": lambda: served(Layer(), X[:3]),
    "under autocast": lambda: served(Layer(), X, around=torch.autocast("cpu", torch.bfloat16)),
    "of another engine": lambda: served(Layer(), X, options={"engine": "onnxruntime"}),
    "with a budget": lambda: served(Layer(), X, options={"memory_budget": "least"}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_one_that_differs_has_its_own(name: str) -> None:
    usual = served(Layer(), X)
    other = OTHERS[name]()
    assert other is not usual
    assert served(Layer(), X) is usual


def test_arguments_that_share_memory_are_another_graph() -> None:
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(x * 2) @ y.t() * torch.tanh(y).sum()).sum()

    one, other = torch.randn(3, 4), torch.randn(3, 4)
    apart = served(forward, one, other)
    assert served(forward, one, one.view(3, 4)) is not apart
    assert served(forward, other, one) is apart


def test_settings_of_the_process_are_part_of_it() -> None:
    usual = served(Layer(), X)
    torch.use_deterministic_algorithms(True)
    try:
        assert served(Layer(), X) is not usual
    finally:
        torch.use_deterministic_algorithms(False)


class Pooled(nn.Module):
    """Asks for more of its sizes where it is taken apart than where Dynamo looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.pixel_unshuffle(torch.tanh(x) * self.scale, 2)
        return nn.functional.max_pool2d(x, 2).sum()


def test_conditions_that_come_late_are_guarded_also_where_a_graph_is_found_again() -> None:
    guarded: list[set[str]] = []
    made: list[Any] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        fakes = [n.meta["example_value"] for n in module.graph.find_nodes(op="placeholder")]
        environment = fake_mode_of(fakes).shape_env
        before = len(environment.guards)
        made.append(ortrain(module, inputs))
        guarded.append({str(each.expr) for each in environment.guards[before:]})
        return made[-1]

    x = torch.randn(2, 2, 8, 8)
    for eager in (Pooled(), Pooled()):
        torch._dynamo.reset()
        call = torch.compile(eager, backend=backend, dynamic=True)
        torch.testing.assert_close(call(x), eager(x))
    assert made[0] is made[1]
    assert guarded[0]
    assert guarded[0] <= guarded[1]


def test_what_nobody_uses_is_gone() -> None:
    made = weakref.ref(served(Layer(), X))
    torch._dynamo.reset()
    gc.collect()
    assert made() is None


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rate, self.slope = nn.Linear(4, 4), 0.3, 0.1

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.leaky_relu(self.linear(x), self.slope)
        return nn.functional.dropout(x, self.rate, self.training)


@pytest.mark.parametrize("name", ["rate", "slope"])
def test_a_number_that_moves_is_that_of_each_graph(name: str) -> None:
    """Dynamo makes a float that moves an input: of 0.0 a graph may have no dropout at all."""
    torch._dynamo.reset()
    module, x = Dropping(), torch.randn(64, 4)
    module.rate = 0.0 if name == "slope" else module.rate
    call, made = compiled(module)
    for value in (0.3, 0.0, 0.5, 0.0, 0.1, 0.0, 1.0):
        setattr(module, name, value)
        output, plain = call(x), nn.functional.leaky_relu(module.linear(x), module.slope)
        kept = output != 0
        scale = 1 - module.rate
        torch.testing.assert_close(output[kept] * scale, plain[kept])
        assert abs(float(kept.float().mean()) - float((plain != 0).float().mean()) * scale) < 0.2
    assert name == "slope" or all(made)

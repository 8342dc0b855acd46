"""Pins what ``ortrain/pytorch`` uses of PyTorch beyond its public interface."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ortrain.pytorch import (
    arrays,
    conditions,
    nodes,
    operators,
    sources,
    switches,
    tracing,
    transforms,
)


def graphs_of(code: Any, *args: Any) -> list[tuple[fx.GraphModule, Sequence[Any]]]:
    """The graphs that Dynamo hands over, with their inputs."""
    found: list[tuple[fx.GraphModule, Sequence[Any]]] = []

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append((module, inputs))
        for node in module.graph.find_nodes(op="placeholder"):
            node.meta["name"] = sources.name_of(node), sources.is_buffer(node)
        return module.forward

    torch._dynamo.reset()
    torch.compile(code, backend=backend)(*args)
    return found


class Layers(nn.Module):
    """Two layers, of which one has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layers(features)


def test_inputs_have_the_names_of_the_module() -> None:
    ((graph, _),) = graphs_of(Layers(), torch.randn(4, 2))
    names = dict(n.meta["name"] for n in graph.graph.find_nodes(op="placeholder"))
    assert not names["layers.0.weight"]
    assert names["layers.1.running_mean"]
    assert not names["features"]


def switched(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return x @ x


def test_regions_are_calls_that_switch() -> None:
    ((graph, _),) = graphs_of(switched, torch.randn(2, 2))
    names = (switches.SET_GRADIENTS, switches.ENTER_AUTOCAST, switches.EXIT_AUTOCAST)
    assert {*names} <= {node.target for node in graph.graph.nodes}


def test_a_placeholder_without_a_source_has_its_own_name() -> None:
    graph = fx.Graph()
    assert sources.name_of(graph.placeholder("l_self_modules_head_buffers_mean_")) == (
        "self_modules_head_buffers_mean"
    )
    assert sources.is_buffer(graph.placeholder("l_self_modules_head_buffers_mean_"))
    assert not sources.is_buffer(graph.placeholder("l_x_"))


def test_a_trace_runs_above_autograd_and_hands_meta_on() -> None:
    assert {"tracing_mode", "pre_dispatch", "_allow_non_fake_inputs"} <= set(
        inspect.signature(make_fx).parameters
    )
    found: list[fx.GraphModule] = []
    marks: list[str] = []

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        fakes = [n.meta["example_value"] for n in module.graph.find_nodes(op="placeholder")]
        for node in module.graph.nodes:
            if node.op == "call_function":
                marks.append(node.name)
                node.meta["custom"] = {"mark": node.name}
        found.append(tracing.traced(fx.Interpreter(module).run, fakes))
        return module.forward

    torch._dynamo.reset()
    torch.compile(Layers(), backend=backend)(torch.randn(4, 2))
    (linear,) = found[0].graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert linear.meta["custom"]["mark"] in marks
    assert linear.meta["stack_trace"]
    assert linear.meta["val"].shape == (4, 3)


def test_a_trace_that_fails_leaves_nothing_switched_on() -> None:
    def failing(x: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(False)
        torch._C._functorch._vmap_increment_nesting(3, "error")
        raise ValueError("failed")

    fake = FakeTensorMode().from_tensor(torch.ones(3, 2))
    with pytest.raises(ValueError, match="failed"):
        tracing.traced(failing, [fake])
    assert torch.is_grad_enabled()
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0


def test_an_operator_can_be_written_into_a_trace() -> None:
    aten = torch.ops.aten
    with FakeTensorMode() as mode:
        x, known = torch.ones(3, 2), torch.ones(3, 2)

    def twice(x: torch.Tensor) -> torch.Tensor:
        with tracing.as_plain_tensors():
            assert tracing.node_of(known) is None
            tracing.write(aten.mul.Tensor, (tracing.node_of(x), 2), {}, known)
            assert tracing.node_of(known) is tracing.last_node()
        return known.sin()

    assert mode is tracing.fake_mode_of([x])
    graph = tracing.traced(twice, [x])
    _, mul, sin, _ = graph.graph.nodes
    assert (mul.target, sin.target, mul.args[1]) == (aten.mul.Tensor, aten.sin.default, 2)
    assert sin.args == (mul,)
    assert mul.meta["val"].shape == (3, 2)


def test_a_float_of_the_caller_is_a_tensor_that_holds_its_number() -> None:
    torch._dynamo.reset()
    found: list[Any] = []

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        fakes = [n.meta["example_value"] for n in module.graph.find_nodes(op="placeholder")]
        copies = [tracing.with_number(v.detach(), v) for v in fakes if isinstance(v, torch.Tensor)]
        found.extend(each.item() for each in copies if not each.dim())
        return module.forward

    with torch._dynamo.config.patch(specialize_float=False):
        torch.compile(lambda x, s: x * s, backend=backend, dynamic=True)(torch.ones(3), 0.5)
    assert [type(each) for each in found] == [torch.SymFloat]


def test_a_fake_tensor_may_have_values() -> None:
    own = torch.ones(2)
    assert tracing.values_of(own) is own
    with FakeTensorMode():
        assert tracing.values_of(torch.empty(2)) is None
        known = tracing.values_of(torch.tensor(3))
    assert known is not None
    assert known.item() == 3


def test_what_is_asked_of_sizes_can_be_asked_again() -> None:
    seen: list[conditions.Symbols] = []

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        fakes = [n.meta["example_value"] for n in module.graph.find_nodes(op="placeholder")]
        symbols = conditions.Symbols(fakes)
        for fake in fakes:
            for size in fake.shape if isinstance(fake, torch.Tensor) else ():
                symbols.plain(size)
        seen.append(symbols)
        return module.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] % 3 == 0 else x

    for rows in (6, 9, 7):
        torch._dynamo.reset()
        torch.compile(forward, backend=backend, dynamic=True)(torch.ones(rows, 2))
    multiple, again, other = seen
    asked = multiple.conditions()
    assert asked
    assert multiple.ranges()
    assert again.hold(asked)
    assert not other.hold(asked)


def test_a_tensor_of_a_transform_is_told_also_when_that_is_over() -> None:
    left: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        left.append(x)
        return x.sum()

    torch.func.grad(keep)(torch.ones(2))
    assert transforms.is_wrapped(left[0])
    assert not transforms.is_wrapped(torch.ones(2))


def test_operators_are_of_two_kinds() -> None:
    assert isinstance(torch.ops.aten.add.Tensor, operators.OpOverload)
    assert isinstance(torch.ops.higher_order.cond, operators.HigherOrderOperator)


class Asking(torch.autograd.Function):
    """Notes which of the nodes behind it a backward comes to, and which take a gradient of five."""

    noted: tuple[list[bool], list[bool]]

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return one.sum() + other.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        behind = ctx.next_functions
        Asking.noted = (
            [nodes.is_asked(node) for node, _ in behind],
            [nodes.takes(node, at, torch.zeros(5)) for node, at in behind],
        )
        return gradient.expand(5), gradient.expand(3)


def test_a_backward_knows_which_nodes_it_comes_to_and_what_they_take() -> None:
    one, other = torch.zeros(5, requires_grad=True), torch.zeros(3, requires_grad=True)
    result = one * 2
    Asking.apply(one, other).backward()
    assert Asking.noted == ([True, True], [True, False])
    torch.autograd.grad(Asking.apply(one, other), one)
    assert Asking.noted == ([True, False], [True, False])
    torch.autograd.grad(Asking.apply(result, other), result)
    assert Asking.noted == ([True, False], [True, False])
    assert nodes.takes(None, 0, one)


class Counted(nn.Module):
    """Scales by what NumPy makes of an array, of a number that it has, or of a constant."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(2, 2), kind
        self.array, self.number = np.ones(2), np.float64(2.0)

    def forward(self, x: torch.Tensor) -> Any:
        scale = np.sqrt(64) if self.kind == "constant" else self.number
        return self.layer(x) * (self.array.sum() if self.kind == "array" else scale)


@pytest.mark.parametrize(("kind", "folds"), [("constant", 1), ("number", 1), ("array", 0)])
def test_what_numpy_computes_of_constants_is_a_number(kind: str, folds: bool) -> None:
    with torch._dynamo.config.patch(trace_numpy=True):
        ((graph, _),) = graphs_of(Counted(kind), torch.ones(1, 2))
    assert arrays.fold_arrays(graph) == folds
    targets = {str(node.target) for node in graph.graph.nodes}
    assert any("wrapped" in target or "Wrapped" in target for target in targets) != folds

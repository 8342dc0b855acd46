"""Pins what ``ortrain/pytorch`` uses of PyTorch beyond its public interface."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from ortrain.pytorch import sources, switches, tracing


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

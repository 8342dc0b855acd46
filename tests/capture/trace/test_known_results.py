"""What a trace looks up instead of computing again leaves graph and conditions as they are."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ortrain.capture import fx
from ortrain.capture.export import Captured, capture
from ortrain.capture.trace import exporter
from ortrain.capture.trace.known_results import results_found_once
from ortrain.capture.trace.known_sizes import ARITHMETIC, RELATIONS, sizes_computed_once
from tests.breadth import crossed

F = nn.functional
Step = Callable[[torch.Tensor], torch.Tensor]
# Each takes [batch, length, 8] and gives the same shape.
STEPS: dict[str, Step] = {
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "softmax": lambda x: x.softmax(-1),
    "softmax_of_lengths": lambda x: x.softmax(1),
    "gelu": F.gelu,
    "dropout": lambda x: F.dropout(x, 0.1),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "attention_by_hand": lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "heads": lambda x: (
        x.unflatten(-1, (2, 4)).transpose(1, 2).contiguous().transpose(1, 2).flatten(2)
    ),
    "transposed": lambda x: x.transpose(1, 2).exp().transpose(1, 2),
    "view_written": lambda x: _view_written(x),
    "in_place": lambda x: x.clone().add_(1).mul_(x),
    "cat": lambda x: torch.cat([x, x], 1)[:, x.shape[1] :],
    "cat_of_views": lambda x: torch.cat([*x.chunk(2, -1)][::-1], -1),
    "where": lambda x: torch.where(x > 0, x, x.mean(1, keepdim=True)),
    "mean": lambda x: x - x.mean((0, 1), keepdim=True),
    "var": lambda x: x / (x.var(1, keepdim=True) + 1),
    "cumsum": lambda x: x.cumsum(1),
    "top": lambda x: x.topk(8, -1).values,
    "sorted": lambda x: x.sort(1).values,
    "largest": lambda x: x - x.max(1, keepdim=True).values,
    "positions": lambda x: x + torch.arange(x.shape[1], dtype=x.dtype)[:, None],
    "expanded": lambda x: x + x[:, :1].expand(-1, x.shape[1], -1),
    "picked": lambda x: x[:, torch.arange(x.shape[1]).flip(0)],
    "mask": lambda x: x.masked_fill(torch.ones_like(x).tril() == 0, 0.0),
    "narrow": lambda x: x.half().float(),
    "branch": lambda x: x * 2 if x.shape[1] > 3 else x,
    "convolution": lambda x: F.conv1d(x, torch.ones(8, 8, 3), padding=1) if x.shape[1] == 8 else x,
}


def _view_written(x: torch.Tensor) -> torch.Tensor:
    result = x.exp()
    result[:, 0] = 0
    result.view(-1)[:1].add_(1)
    return result


class Repeated(nn.Module):
    """Layers of the same steps, with parameters of their own."""

    def __init__(self, names: tuple[str, ...], layers: int = 2) -> None:
        super().__init__()
        self.names = names
        self.linear = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        for linear in self.linear:
            x = linear(x)
            for name in self.names:
                x = STEPS[name](x)
        # Behind the layers the trace learns that two sizes are the same.
        x = x + other
        for linear in self.linear:
            x = linear(x)
            for name in self.names:
                x = STEPS[name](x)
        return x.sum()


def told(captured: Captured) -> tuple[str, str, Any]:
    return captured.program.text(), repr(captured.constraints), captured.rung


@contextlib.contextmanager
def computed_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, nothing is looked up."""
    with monkeypatch.context() as patches:
        for module in (exporter, fx):
            patches.setattr(module, "results_found_once", contextlib.nullcontext)
            patches.setattr(module, "sizes_computed_once", contextlib.nullcontext)
        yield


@pytest.mark.parametrize(("number", "autocast"), crossed(range(9), [False, True], one_in=2))
def test_graph_and_conditions_are_those_of_a_trace_that_computes_all_again(
    number: int, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [*STEPS]
    module = Repeated(tuple(names[number * 3 : number * 3 + 3]))
    call = torch.randn(4, 5, 8), torch.randn(4, 5, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = told(capture(module, call, branches=True))
        with computed_again(monkeypatch):
            assert found == told(capture(module, call, branches=True))


def test_layers_that_are_alike_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: Counter[str] = Counter()
    own = FakeTensorMode._dispatch_impl

    def counted(mode: Any, operator: Any, *rest: Any) -> Any:
        ran[str(operator)] += 1
        return own(mode, operator, *rest)

    monkeypatch.setattr(FakeTensorMode, "_dispatch_impl", counted)
    module = nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.GELU()) for _ in range(6)))
    call = (torch.randn(4, 5, 8),)
    capture(module, call)
    once = ran["aten.native_layer_norm.default"], ran["aten.gelu.default"]
    ran.clear()
    with computed_again(monkeypatch):
        capture(module, call)
    again = ran["aten.native_layer_norm.default"], ran["aten.gelu.default"]
    assert again == (6, 6)
    assert max(once) <= 2  # of the first layer alone what comes in requires no gradient


def symbol(environment: ShapeEnv, value: int, name: str) -> torch.SymInt:
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(name)
    made = environment.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
    return environment.create_symintnode(made, hint=value, source=source)  # type: ignore[return-value]


OPERATIONS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "int_floordiv": lambda a, b: a // b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


@pytest.mark.parametrize("method", OPERATIONS)
def test_sizes_are_what_they_are_when_computed_each_time(method: str) -> None:
    operation = OPERATIONS[method]

    def all_results() -> list[Any]:
        environment = ShapeEnv()
        a, b = symbol(environment, 4, "a"), symbol(environment, 6, "b")
        sizes: list[Any] = [a, b, a + b, a * b, 2 * a, 1, 2, 4, True, 2.0]
        pairs = [(x, y) for x in sizes[:6] for y in sizes] + [
            (y, x) for x in sizes[:6] for y in sizes
        ]
        results: list[Any] = []
        for _ in range(2):
            for x, y in pairs:
                try:
                    result = operation(x, y)
                except TypeError as error:  # torch compares no size with a bool
                    results.append((TypeError, str(error)))
                    continue
                number = result if type(result) in (int, float, bool) else result.node
                shown = (
                    number
                    if number is result
                    else (number.expr, number.pytype, number.hint, number._optimized_summation)
                )
                results.append((type(result), shown))
            torch._check(a * 3 == b * 2)  # a condition between the first and the second time
            bool(a + 2 == b)  # and one by which a symbol is replaced
        return results

    with sizes_computed_once():
        found = all_results()
    assert found == all_results()


def test_each_answer_is_a_node_of_its_own() -> None:
    environment = ShapeEnv()
    size = symbol(environment, 4, "a")
    with sizes_computed_once():
        first, second = size * 3, size * 3
    assert first.node is not second.node
    assert first.node.expr == second.node.expr


def test_torch_has_what_is_used_beyond_its_documentation() -> None:
    environment = ShapeEnv()
    assert environment._replacements_version_counter == 0
    assert not environment._translation_validation_enabled
    assert callable(environment.suppress_guards)
    assert all(callable(getattr(SymNode, f"_{name}")) for name in (*ARITHMETIC, *RELATIONS))
    nodes: Any = SymNode
    own = FakeTensorMode.dispatch, nodes._add
    with results_found_once(), sizes_computed_once():
        assert FakeTensorMode.dispatch is not own[0]
        assert nodes._add is not own[1]
    assert (FakeTensorMode.dispatch, nodes._add) == own

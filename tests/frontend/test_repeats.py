"""Statements that a trace writes down without running them: the graph is that of running all."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ortrain.frontend import aten
from ortrain.frontend.repeats import Repeats
from ortrain.pytorch.tracing import traced
from tests.models import MODELS


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch._dynamo.reset()


def rows_of(graph: fx.GraphModule) -> list[tuple[Any, ...]]:
    """What a graph calls, on what, and what is known of each result."""

    found: dict[str, str] = {}  # sizes that are found out at each trace anew, by a new name

    def plain(value: Any) -> str:
        for name in re.findall(r"\bu\d+", str(value)):
            found.setdefault(name, f"found {len(found)}")
        return re.sub(r"\bu\d+", lambda name: found[name[0]], str(value))

    def about(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return plain(value)
        sizes = (tuple(value.shape), value.stride(), value.storage_offset())
        return (value.dtype, value.device, value.requires_grad, plain(sizes))

    places = {node: i for i, node in enumerate(graph.graph.nodes)}
    memories: dict[int, int] = {}

    def memory(value: Any) -> int:
        own = value.untyped_storage()._cdata if isinstance(value, Tensor) else 0
        return memories.setdefault(own, len(memories))

    def called(given: Any) -> str:
        return str(fx.map_arg(given, lambda node: f"node {places[node]}"))

    rows = []
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        region = (node.meta.get("stack_trace"), node.meta.get("custom"))
        call = (node.op, str(node.target), called(node.args), called(node.kwargs))
        rows.append((*call, about(value), memory(value), region))
    return rows


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many statements of each trace were written down; all graphs are compared at the end."""
    written: list[int] = []
    graphs: list[tuple[Any, Any]] = []
    make, call = aten.aten_of, Repeats._call

    def compared(module: fx.GraphModule, fakes: list[Any]) -> fx.GraphModule:
        counted: list[int] = []

        def counting(self: Repeats, *args: Any) -> Any:
            found = call(self, *args)
            counted.append(found is not None)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(Repeats, "_call", lambda *_: None)
            expected = rows_of(make(module, fakes))
        with monkeypatch.context() as patch:
            patch.setattr(Repeats, "_call", counting)
            graph = make(module, fakes)
        graphs.append((rows_of(graph), expected))
        written.append(sum(counted))
        return graph

    monkeypatch.setattr("ortrain.frontend.program.aten_of", compared)
    yield written
    for rows, expected in graphs:
        assert rows == expected


def layers(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(3):
        rows = torch.tanh(functional.linear(x, w)).view(-1, x.shape[-1])
        x = functional.layer_norm(rows, (4,)) + x
    return x


def written_to(x: Tensor, w: Tensor) -> Tensor:
    y = functional.linear(x, w)
    z = functional.linear(x, w)
    z.view(-1).mul_(2)
    return functional.linear(y, w).relu_() + z


def taken_twice(x: Tensor, w: Tensor) -> Tensor:
    a, b = torch.sin(x), torch.sin(w)
    return (a[:4] * b) + (a[:4] * a[:4]) + (b * b)


def switched(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        a = torch.sin(x) @ w
    with torch.autocast("cpu", torch.bfloat16):
        b = torch.sin(x) @ w
    return a + b + torch.sin(x) @ w


def handed_on(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    a, b = functional.dropout(x, 0.5, False), functional.dropout(w, 0.5, False)
    turned, also = x.transpose(0, 1), w.transpose(0, 1)
    return a, b, a.contiguous(), turned, also, turned.contiguous(), also.contiguous()


def turned_in_place(x: Tensor, w: Tensor) -> Tensor:
    a, b, c = torch.sin(x), torch.sin(x), functional.linear(x, w)
    return a + b.t_().t() + c.unsqueeze_(0).sum()


def restored(x: Tensor, w: Tensor) -> Tensor:
    rows = torch.arange(4)
    table, other = w.detach().clone(), w.detach().clone()
    a = functional.embedding(rows, table, max_norm=0.1)
    return a + functional.embedding(rows, other, max_norm=0.1) + table + other + x.sum()


def rows_of_a_mask(x: Tensor, w: Tensor) -> Tensor:
    rows = x[x[:, 0] > 0]
    return functional.linear(torch.tanh(functional.linear(rows, w)), w).sum() + x.sum()


def repeated(x: Tensor, w: Tensor) -> Tensor:
    def body(x: Tensor) -> Tensor:
        return functional.linear(torch.tanh(functional.linear(x, w)), w)

    for _ in range(2):
        x = checkpoint(body, x, use_reentrant=False)
    return body(x)


CODES = (
    layers, written_to, taken_twice, switched, handed_on, turned_in_place, restored, rows_of_a_mask,
    repeated,
)  # fmt: skip


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.__name__)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_is_that_of_running_every_statement(
    code: Callable[..., Any], dynamic: bool, both: list[int]
) -> None:
    given = [torch.randn(5, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)]
    made = torch.compile(code, backend="ortrain", dynamic=dynamic)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        results, expected = made(*given), code(*given)
    for own, other in zip(
        *((e if isinstance(e, tuple) else (e,)) for e in (results, expected)), strict=True
    ):
        torch.testing.assert_close(own, other)
    assert both


@pytest.mark.parametrize("kind", ["bert", "vit", "t5"])
def test_models_repeat_statements(kind: str, both: list[int]) -> None:
    model = MODELS[kind].build()
    torch.compile(model, backend="ortrain", dynamic=True)(**MODELS[kind].batch())
    assert sum(both) > 20


def test_a_result_is_written_down_once() -> None:
    with FakeTensorMode():
        x, known = torch.ones(3, 2), torch.ones(3, 2)
    repeats = Repeats()

    def thrice(x: Tensor) -> list[Tensor]:
        given = ((x,), {})
        return [repeats.run(lambda f, a, _: f(*a), known, torch.sin, given) for _ in range(3)]

    graph = traced(thrice, [x])
    (results,) = graph.graph.output_node().args
    assert len({*results}) == 3

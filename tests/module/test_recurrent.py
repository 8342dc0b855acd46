"""Recurrent layers train in the graph as in eager."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from ortrain import Options, ORTModule
from tests.module.agreement import GRAPH, assert_agree, double, in_double, step

Loss = Callable[[nn.ModuleDict, dict[str, Tensor]], Tensor]


class Trained(nn.Module):
    """A loss of some layers."""

    def __init__(self, loss: Loss, **layers: nn.Module) -> None:
        super().__init__()
        self.loss = [loss]
        self.layers = nn.ModuleDict(layers)

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.loss[0](self.layers, inputs)


def trains(
    loss: Loss, *batches: dict[str, Tensor], options: Options = GRAPH, **layers: nn.Module
) -> ORTModule:
    """Compares loss and gradients of graphs with eager and float64, for every batch."""
    module = Trained(loss, **layers)
    graph, truth = ORTModule(copy.deepcopy(module), options=options), in_double(module)
    for batch in batches:
        assert_agree(step(graph, batch), step(module, batch), step(truth, double(batch)))
    assert graph.report.mode == "graph"
    assert graph.report.captures == 1
    return graph


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape)


def everything(layers: nn.ModuleDict, inputs: dict[str, Tensor]) -> Tensor:
    """All that a layer returns, unevenly."""
    y, last = layers["a"](inputs["x"])
    states = last if isinstance(last, tuple) else (last,)
    total = (y * torch.linspace(-1, 2, y.shape[-1])).sum()
    return total + sum((i + 2) * state.square().sum() for i, state in enumerate(states))


@pytest.mark.parametrize("options", [
    {}, {"bias": False}, {"num_layers": 2, "bidirectional": True, "batch_first": True},
], ids=["plain", "no-bias", "deep"])  # fmt: skip
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_every_gradient_of_a_layer_is_eagers(kind: Any, options: dict[str, Any]) -> None:
    batches = [{"x": floats(*size, 3)} for size in ((5, 2), (3, 4), (6, 1))]
    trains(everything, *batches, a=kind(3, 8, **options))


def test_gradients_reach_initial_states_and_what_they_come_from() -> None:
    def loss(layers: nn.ModuleDict, inputs: dict[str, Tensor]) -> Tensor:
        h, c = layers["start"](inputs["s"]).chunk(2, -1)
        y, _ = layers["a"](layers["before"](inputs["x"]), (h[None], c.tanh()[None]))
        return y.square().sum()

    batches = [{"x": floats(t, b, 3), "s": floats(b, 4)} for t, b in ((5, 2), (3, 3))]
    trains(
        loss, *batches, a=nn.LSTM(3, 8), start=nn.Linear(4, 16), before=nn.Linear(3, 3)
    )  # fmt: skip


@pytest.mark.parametrize("state", ["hidden", "cell", "last output"])
def test_one_result_alone_may_be_used(state: str) -> None:
    def loss(layers: nn.ModuleDict, inputs: dict[str, Tensor]) -> Tensor:
        y, (h, c) = layers["a"](inputs["x"])
        picked: Tensor = {"hidden": h, "cell": c, "last output": y[-1]}[state]
        return picked.square().sum()

    trains(loss, {"x": floats(5, 2, 3)}, {"x": floats(3, 4, 3)}, a=nn.LSTM(3, 8))


def test_a_loop_over_cells_trains() -> None:
    def loss(layers: nn.ModuleDict, inputs: dict[str, Tensor]) -> Tensor:
        x, h = inputs["x"], None
        total = x.new_zeros(())
        for t in range(3):
            h = layers["lstm"](x[:, t], h)
            total = total + layers["rnn"](layers["gru"](h[0])).square().sum()
        return total + h[1].sum()

    trains(
        loss, {"x": floats(2, 3, 3)}, {"x": floats(4, 3, 3)},
        lstm=nn.LSTMCell(3, 8), gru=nn.GRUCell(8, 5), rnn=nn.RNNCell(5, 4),
    )  # fmt: skip


def test_a_checkpointed_layer_runs_again() -> None:
    def loss(layers: nn.ModuleDict, inputs: dict[str, Tensor]) -> Tensor:
        def encoded(x: Tensor) -> Tensor:
            y: Tensor = layers["a"](x)[0]
            return y.tanh()

        y = checkpoint(encoded, layers["before"](inputs["x"]), use_reentrant=False)
        total: Tensor = layers["after"](y)[0].square().sum()
        return total

    trains(
        loss, {"x": floats(5, 2, 3)}, {"x": floats(2, 3, 3)},
        before=nn.Linear(3, 3), a=nn.LSTM(3, 8, bidirectional=True), after=nn.GRU(16, 4),
    )  # fmt: skip


def test_the_backward_may_run_in_pieces_and_come_from_the_cache(tmp_path: Path) -> None:
    layers = {"a": nn.LSTM(3, 8, num_layers=2, bidirectional=True)}
    for options in (
        Options(engine="onnxruntime", fallback="raise", backward_pieces=4),
        *[Options(engine="onnxruntime", fallback="raise", cache_dir=tmp_path)] * 2,
    ):
        trains(everything, {"x": floats(5, 2, 3)}, options=options, **copy.deepcopy(layers))
    assert list(tmp_path.iterdir())


class Carried(nn.Module):
    """A layer inside a module, which takes the state where it ended."""

    def __init__(self, kind: Callable[..., nn.Module], layers: int) -> None:
        super().__init__()
        self.layer = kind(4, 3, layers, batch_first=True)

    def forward(self, x: Tensor, state: Any = None) -> Any:
        return self.layer(x, state)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_states_that_are_carried_on_are_captured_without_a_warning(
    kind: Callable[..., nn.Module],
) -> None:
    """A trace leaves stand-ins in the references that such a layer holds to its weights."""
    model = ORTModule(Carried(kind, 2), options=Options(engine="aten", fallback="raise"))
    state: Any = None
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as caught:  # as errors they would be caught
            warnings.simplefilter("always")
            for _ in range(2):
                y, state = model(torch.randn(6, 7, 4), state)
                y.sum().backward()
                state = tree_map(Tensor.detach, state)
    finally:
        torch.set_warn_always(always)
    assert caught == []
    assert model.report.mode == "graph"


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_under_autocast_are_graphs(kind: Callable[[int, int], nn.Module]) -> None:
    """PyTorch composes them of products that it casts, and writes to the gates where they lie."""

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = kind(3, 5)

        def forward(self, x: Tensor) -> Tensor:
            state: Any = None
            for row in x.unbind(1):
                state = self.cell(row, state)
            last: Tensor = state[0] if isinstance(state, tuple) else state
            return last

    module = Loop()
    model = ORTModule(copy.deepcopy(module), options=Options(engine="aten", fallback="raise"))
    x = floats(4, 2, 3)
    found = []
    for each in (module, model):
        with torch.autocast("cpu", torch.bfloat16):
            each(x).float().square().sum().backward()
        found.append([parameter.grad for parameter in each.parameters()])
    assert model.report.graph_calls == 1
    for its, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, its, rtol=2e-2, atol=2e-2)

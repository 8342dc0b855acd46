"""Equal blocks, each compiled for itself: one graph, and the model's own results."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ortrain import Options, ORTModule
from ortrain.frontend import autotune, machine
from ortrain.frontend.policy import BLOCKS, MODULE, Challenger, Policy


@pytest.fixture(autouse=True)
def no_waiting() -> None:
    """Where no step is to come, nothing is tried."""


@pytest.fixture(autouse=True)
def blocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are tried as soon as a step has been seen, and nothing else is."""
    ways = [Challenger(BLOCKS, cost=0.0, gain=0.9)]
    monkeypatch.setattr("ortrain.frontend.policy.LOADING", 0.0)
    monkeypatch.setattr(machine, "challengers_of", lambda *_, **__: ways)
    monkeypatch.setattr(autotune, "SECONDS", 0.0)
    monkeypatch.setattr(autotune, "MARGIN", 100.0)  # blocks win whatever the clock says
    monkeypatch.setattr(autotune.Duel, "_look_early", lambda *_: None)


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = dropout

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = nn.functional.dropout(torch.tanh(self.first(x)), self.dropout, self.training)
        return x + self.second(h) if mask is None else x + self.second(h) * mask


class Deep(nn.Module):
    def __init__(
        self, dropout: float = 0.0, checkpoints: bool | None = None, layers: int = 4
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.dropout, self.checkpoints = dropout, checkpoints

    def forward(self, ids: Tensor) -> Tensor:
        x = nn.functional.dropout(self.embedding(ids), self.dropout, self.training)
        mask = (ids > 2)[..., None].to(x.dtype)
        for layer in self.layers:
            if self.checkpoints is not None:
                x = checkpoint(layer, x, mask, use_reentrant=self.checkpoints)
            else:
                x = layer(x, mask)
        return x.square().mean()


def trained(model: Any, steps: int = 16) -> list[Tensor]:
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        loss = model(torch.randint(0, 20, (3 + step % 2, 5 + step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def made(model: ORTModule) -> Any:
    (compiled,) = model._runner.graphs.compiled.values()
    return compiled


def test_a_model_trains_as_without_and_its_layers_have_one_graph() -> None:
    module = Deep(layers=12)
    plain = copy.deepcopy(module)
    model = ORTModule(module)
    torch.testing.assert_close(trained(model), trained(plain))
    torch.testing.assert_close([*module.parameters()], [*plain.parameters()])
    assert model.report.graph_calls >= 3
    assert len(made(model).graphs) == 1
    assert made(model).conversions == 1


def test_blocks_of_several_kinds_have_their_graphs_one_call_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that no step waits long."""
    monkeypatch.setattr(Policy, "may_convert", True)  # whatever conversions take

    class Narrow(Block):
        pass

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.ModuleList(Block(0.3) for _ in range(3))
            self.second = nn.ModuleList(Narrow(p) for p in (0.3, 0.3, 0.5, 0.5))

        def forward(self, ids: Tensor) -> Tensor:
            x = nn.functional.one_hot(ids, 20)[..., :8].float()
            for block in (*self.first, *self.second):
                x = block(x)
            return x.square().mean()

    module = Both()
    model, late = ORTModule(module), ORTModule(copy.deepcopy(module))
    late.steps_to_come = 0
    count, losses = [], []
    for step in range(8):
        losses.append(trained(model, 1))
        count.append(len(made(model).made) if model._runner.graphs is not None else 0)
        assert count[-1] - (count[-2] if step else 0) <= 1
    assert count[-1] == count[-2] >= 2  # of numbers that other tests have moved, one for all
    torch.testing.assert_close(losses, [trained(late, 1) for _ in range(8)])
    torch.testing.assert_close([*module.parameters()], [*late.parameters()])


def test_what_is_drawn_does_not_depend_on_when_they_are_graphs() -> None:
    module = Deep(dropout=0.3)
    early, late = ORTModule(module), ORTModule(copy.deepcopy(module))
    late.steps_to_come = 0
    torch.testing.assert_close(trained(early), trained(late))
    assert early.report.graph_calls
    assert not late.report.graph_calls
    assert not torch.allclose(trained(early)[0], trained(copy.deepcopy(module))[0])


@pytest.mark.parametrize("ways", [[Challenger(BLOCKS, 0.0, 0.9)], [Challenger(MODULE, 0.0, 0.9)]])
def test_a_call_that_would_need_a_graph_too_many_draws_the_same(
    ways: list[Challenger], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "challengers_of", lambda *_, **__: ways)
    module = Deep(dropout=0.3)
    model, late = ORTModule(module), ORTModule(copy.deepcopy(module))
    late.steps_to_come = 0
    torch.testing.assert_close(trained(model), trained(late))
    before = model.report.graph_calls
    assert before
    monkeypatch.setattr(Policy, "may_convert", False)
    for each in (model, late):
        each.double()
    torch.testing.assert_close(trained(model), trained(late))
    assert model.report.graph_calls == before
    for each in (model, late):
        each.float()
    torch.testing.assert_close(trained(model), trained(late))


@pytest.mark.parametrize("reentrant", [False, True])
def test_within_a_checkpoint_a_block_is_pytorchs_both_times(reentrant: bool) -> None:
    module = Deep(dropout=0.3, checkpoints=reentrant)
    model, twin = ORTModule(module), ORTModule(copy.deepcopy(module))
    twin.steps_to_come = 0
    with pytest.warns(Warning, match="within checkpoints"):
        found = trained(model)
    torch.testing.assert_close(found, trained(twin))


def test_a_hook_on_a_block_that_comes_later_is_heard() -> None:
    module = Deep()
    model, ids = ORTModule(module), torch.randint(0, 20, (3, 5))
    trained(model)
    expected = module.layers[1].register_forward_hook(lambda *given: given[-1] * 2)
    torch.testing.assert_close(model(ids), copy.deepcopy(module)(ids))
    expected.remove()
    torch.testing.assert_close(model(ids), copy.deepcopy(module)(ids))


def test_blocks_that_somebody_calls_and_copies_are_the_modules_own() -> None:
    module = Deep()
    model, x = ORTModule(module, options=Options(engine="aten")), torch.randn(2, 5, 8)
    trained(model)
    assert model.report.mode == "graph"
    copied, again = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    for each in (copied, again):
        assert all(layer._compiled_call_impl is None for layer in each.layers)
        torch.testing.assert_close(each.layers[0](x), module.layers[0](x))


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_blocks_that_the_user_has_compiled_stay_so() -> None:
    module = Deep()
    ran: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        return lambda *args: (ran.append(1), graph.forward(*args))[1]

    module.layers[0].compile(backend=backend)
    own = module.layers[0]._compiled_call_impl
    model = ORTModule(module)
    trained(model)
    assert module.layers[0]._compiled_call_impl is own
    assert len(ran) >= 16
    assert model.report.graph_calls == 0  # and no other block is compiled beside it


def test_blocks_without_a_graph_are_given_up_with_the_reason() -> None:
    class Spectral(Block):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return torch.fft.fft(x).abs()

    module = Deep()
    module.layers = nn.ModuleList(Spectral() for _ in range(3))
    plain = copy.deepcopy(module)
    model = ORTModule(module)
    with pytest.warns(Warning, match="fft"):
        found = trained(model)
    torch.testing.assert_close(found, trained(plain))
    assert model.report.mode == "eager"
    assert "fft" in model.report.reason


class Moody(Block):
    """Draws of a generator of its own, or puts rows together that do not fit."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.draws, self.fits, self.random = draws, True, random.Random(0)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = super().forward(x, mask)
        if self.draws:
            x = x * self.random.random()
        return x if self.fits else nn.functional.embedding(torch.tensor([5]), x[0, :3])


def moody(draws: bool) -> Deep:
    module = Deep()
    module.layers = nn.ModuleList(Moody(draws) for _ in range(4))
    return module


@pytest.mark.filterwarnings("ignore:ORTModule runs")
def test_blocks_that_dynamo_does_not_follow_run_in_pytorch() -> None:
    module = moody(True)
    eager = copy.deepcopy(module)
    model = ORTModule(module)
    torch.testing.assert_close(trained(model, 8), trained(eager, 8), rtol=0.0, atol=0.0)
    assert model.report.graph_calls == 0
    assert "a generator of Python's of its own" in model.report.reason


def test_a_wrong_call_of_blocks_raises_their_own_error_and_the_next_is_a_graph() -> None:
    module = moody(False)
    model = ORTModule(module)
    trained(model, 8)
    before = model.report.graph_calls
    assert before
    for block in module.layers:
        block.fits = False
    with pytest.raises(IndexError, match="out of range"):
        trained(model, 1)
    for block in module.layers:
        block.fits = True
    trained(model, 4)
    assert model.report.graph_calls > before


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own doing
def test_a_function_that_the_user_has_compiled_beside_blocks_is_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Policy, "may_convert", True)  # whatever conversions take
    seen = []

    def backend(graph: Any, _: Any) -> Any:
        seen.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def scaled(x: Tensor, name: str) -> Tensor:
        if x.sum() > 1e6:  # two graphs
            x = x / 2
        return x * 3 if name else x

    class Beside(Deep):
        calls = 0

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids)
            for layer in self.layers:
                x = layer(x)
            self.calls += 1  # blocks have their graph by then, and each call is another
            return (scaled(x, f"{self.calls}") if self.calls > 8 else x * 3).square().mean()

    module = Beside()
    plain = copy.deepcopy(module)
    model = ORTModule(module)
    losses = trained(model)
    assert model.report.graph_calls > 8
    assert len(seen) > 1
    torch.testing.assert_close(losses, trained(plain))

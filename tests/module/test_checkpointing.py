"""Activation checkpointing: the graph runs checkpointed layers again, with the same gradients."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ortrain import ORTModule
from tests.breadth import sampled
from tests.models import MODELS
from tests.module.agreement import GRAPH, assert_agree, double, in_double, step

CHECKPOINTED = sampled(["bert", "gpt2", "t5", "vit"], ["bert", "vit"])


def graph_of(module: nn.Module) -> ORTModule:
    return ORTModule(copy.deepcopy(module), options=GRAPH)


def with_checkpoints(module: Any) -> Any:
    """A copy with checkpointed layers."""
    module = copy.deepcopy(module)
    for config in [getattr(m, "config", None) for m in module.modules()]:
        if getattr(config, "use_cache", False):
            config.use_cache = False
    module.activation_checkpointing_enable()
    return module


def saved_bytes(model: ORTModule) -> int:
    return model.report.saved_bytes


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_layers_that_recompute_have_the_same_gradients(name: str) -> None:
    case = MODELS[name]
    eager = with_checkpoints(case.build())
    graph = graph_of(eager)
    for batch, length in ((3, 7), (1, 5)):
        inputs = case.batch(batch, length)
        truth = step(in_double(eager), double(inputs))
        assert_agree(step(graph, inputs), step(eager, inputs), truth)
    assert graph.report.graph_calls == 2


@pytest.mark.parametrize("name", sampled(["bert", "gpt2", "t5", "vit"], ["bert"]))
def test_less_is_kept_between_forward_and_backward(name: str) -> None:
    case = MODELS[name]
    module = case.build()
    plain, frugal = graph_of(module), graph_of(with_checkpoints(module))
    for model in (plain, frugal):
        step(model, case.batch(8, 32))
    assert saved_bytes(frugal) < 0.5 * saved_bytes(plain)


def test_what_runs_again_draws_the_same_masks() -> None:
    case = MODELS["bert"]
    module = case.build(dropout=0.3)
    plain, frugal = graph_of(module), graph_of(with_checkpoints(module))
    outcomes = []
    for model in (plain, frugal):
        torch.manual_seed(5)
        outcomes.append(step(model, case.batch(4, 9)))
    assert torch.equal(outcomes[0].loss, outcomes[1].loss)
    for name, gradient in outcomes[0].gradients.items():
        torch.testing.assert_close(gradient, outcomes[1].gradients[name], msg=name)


def test_switching_checkpoints_on_and_off_is_another_capture_each() -> None:
    case = MODELS["bert"]
    model = graph_of(case.build())
    kept = []
    for switch in ("enable", "disable", "enable"):
        getattr(model, f"activation_checkpointing_{switch}")()
        step(model, case.batch())
        kept.append(saved_bytes(model))
    assert kept[0] == kept[2] < kept[1]


class Blocks(nn.Module):
    """A chain of blocks, each inside a checkpoint of its own, with another one inside."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(6)
        )
        self.checkpointed = checkpointed

    def inner(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(block, x, use_reentrant=False)
        return x + y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(self.inner, block, x, use_reentrant=False)
            else:
                x = x + block(x)
        return x.square().mean()


def test_checkpoints_in_a_modules_own_code_count_and_of_nested_ones_the_outermost() -> None:
    x = torch.randn(32, 16)
    plain, frugal = graph_of(Blocks(False)), graph_of(Blocks(True))
    losses = [model(x) for model in (plain, frugal)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for ours, theirs in zip(frugal.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    # Of each block its input, of the first the module's own, and what is squared; the mean's count.
    assert saved_bytes(frugal) == 6 * x.nbytes + 4


def test_each_checkpoint_runs_again_in_a_piece_of_its_own() -> None:
    model = graph_of(Blocks(True))
    model(torch.randn(32, 16))
    assert len(model.report.nodes) == 1 + 1 + 6  # the forward, the loss, the blocks


class Reentrant(nn.Module):
    """Blocks in checkpoints of the kind that all were before PyTorch 1.11."""

    def __init__(self, first: bool = False, nested: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8) if first else None
        self.nested = nested
        self.inner = nn.Linear(8, 16)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)])
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first is not None:
            x = checkpoint(self.first, x, use_reentrant=True)
        x = self.inner(x)
        for block in self.blocks:
            if self.nested:
                x, (again,) = checkpoint(
                    lambda v, block=block: (block(v), (2.0 * block(v),)), x, use_reentrant=True
                )
                x = x + again
            else:
                x = checkpoint(block, x, use_reentrant=True)
        result: torch.Tensor = self.head(x)
        return result


def assert_steps_agree(model: nn.Module, eager: nn.Module) -> None:
    """Compares gradients of two batches, and which of them there are."""
    for rows in (6, 3):
        x = torch.randn(rows, 8)
        for each in (eager, model):
            each.zero_grad()
            each(x).pow(2).mean().backward()
        for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if theirs.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad)


def test_reentrant_checkpoints_are_regions_as_the_others_are() -> None:
    eager = Reentrant()
    model = graph_of(eager)
    assert_steps_agree(model, eager)
    assert all(parameter.grad is not None for parameter in eager.parameters())
    assert (model.report.captures, model.report.graph_calls) == (1, 2)
    assert len(model.report.nodes) > 4  # a piece of the backward for each region


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
@pytest.mark.parametrize("kind", ["first", "nested"])
def test_what_a_reentrant_checkpoint_gives_no_gradient_has_none(kind: str) -> None:
    """An argument that needs none, and what comes in more than a tuple: a graph would give them."""
    eager = Reentrant(**{kind: True})
    model = ORTModule(copy.deepcopy(eager), options=replace(GRAPH, fallback="torch"))
    assert_steps_agree(model, eager)
    assert model.report.graph_calls == 0
    assert "do not compute what it does" in model.report.reason


@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_function_that_asks_whether_gradients_are_on_stays_pytorchs(dropout: float) -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.dropout = nn.Linear(4, 4), nn.Dropout(dropout)

        def twice(self, x: torch.Tensor) -> torch.Tensor:
            return 2.0 * x if torch.is_grad_enabled() else 3.0 * x

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = checkpoint(self.twice, self.dropout(self.inner(x)), use_reentrant=True)
            result: torch.Tensor = y
            return result

    eager = Asking()
    model = ORTModule(copy.deepcopy(eager), options=replace(GRAPH, fallback="torch"))
    x = torch.randn(3, 4)
    results = []
    for each in (eager, model):
        torch.manual_seed(0)
        results.append(each(x))
        results[-1].sum().backward()
    assert torch.equal(*results)
    assert model.report.graph_calls == 0
    assert "do not compute what it does" in model.report.reason


@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_statistics_that_a_checkpoint_moves_twice_are_pytorchs(reentrant: bool) -> None:
    class Normalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = checkpoint(self.block, self.inner(x), use_reentrant=reentrant)
            return y

    eager = Normalized()
    model = ORTModule(copy.deepcopy(eager), options=replace(GRAPH, fallback="torch"))
    for _ in range(3):
        x = torch.randn(6, 4)
        for each in (eager, model):
            each(x).pow(2).sum().backward()
    for ours, theirs in zip(model.buffers(), eager.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    assert "a checkpoint changes a tensor that it has not made" in model.report.reason

"""Activation checkpointing: the graph runs checkpointed layers again, with the same gradients."""

from __future__ import annotations

import copy
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
    assert (graph.report.captures, graph.report.graph_calls) == (1, 2)


@pytest.mark.parametrize("name", CHECKPOINTED)
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

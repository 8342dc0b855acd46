"""A held module on a card: PyTorch against recorded graphs, on a stand-in that forgives nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from ortrain.step.eager_draws import AsGraphs
from ortrain.step.seeds import Seeds
from tests.runtime.aten.recording import Card, install
from tests.runtime.aten.scenarios import SCENARIOS, Network, Scenario, gradients, run_again

pytestmark = pytest.mark.usefixtures("graph_wins")

PLAIN = Options(engine="aten", fallback="raise", cuda_graphs=False)
RECORDED = Options(engine="aten", fallback="raise", skip_padding=False)
AUTO = Options(skip_padding=False)
# Steps of an optimizer, by other kernels than eager's.
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """The CPU in the place of a card; graphs and recordings may take as long as they will."""
    monkeypatch.setattr("ortrain.frontend.policy.SHARE", 1e9)
    return install(monkeypatch)


class Eager(nn.Module):
    """A module in PyTorch, which draws what graphs draw."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with AsGraphs(Seeds()):
            return self.module(*args, **kwargs)


def replays_of(model: ORTModule) -> Any:
    found = model.report.replays
    assert found is not None
    return found


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_a_recorded_module_does_what_it_does_unrecorded(scenario: Scenario) -> None:
    found, module = [], Network()
    for options in (PLAIN, RECORDED):
        model = ORTModule(copy.deepcopy(module), options=options)
        torch.manual_seed(5)
        found.append([*scenario(model), *model.buffers()])
    for mine, its in zip(*found, strict=True):
        assert torch.equal(mine, its)
    replays = model.report.replays
    assert replays is None or not replays.refused
    if scenario is not run_again:
        assert replays_of(model).replayed > 0


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_a_contest_on_a_card_trains_as_eager_does(scenario: Scenario) -> None:
    found, module = [], Network()
    module.norm = nn.LayerNorm(6)  # of statistics eager allows one forward a backward
    for wrap in (Eager, lambda module: ORTModule(module, options=AUTO)):
        model: Any = wrap(copy.deepcopy(module))
        torch.manual_seed(5)
        found.append([each.detach().clone() for _ in range(5) for each in scenario(model)])
        found[-1] += model.buffers()
    for mine, its in zip(*found, strict=True):
        torch.testing.assert_close(mine, its, **CLOSE)

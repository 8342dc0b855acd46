"""Programs that are recorded and replayed give what they give without that, whatever the calls."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ortrain import Options, ORTModule
from ortrain.frontend.export import export
from ortrain.runtime.aten import AtenExecutor, hash
from ortrain.runtime.aten.graphs.recorders import CudaRecorder
from ortrain.runtime.aten.graphs.recordings import MOST, RESTED
from ortrain.runtime.aten.graphs.watch import Unrecordable, Watch
from tests.runtime.aten.recording import Card, Stream, install
from tests.runtime.aten.scenarios import (
    SCENARIOS,
    Network,
    Scenario,
    batch,
    gradients,
    many_sizes,
    one_size,
    run_again,
    steps,
    two_forwards,
)

PLAIN = Options(engine="aten", fallback="raise")
RECORDED = Options(engine="aten", fallback="raise", cuda_graphs=True)


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """The CPU in the place of a GPU."""
    return install(monkeypatch)


@pytest.mark.filterwarnings("ignore:ORTModule runs Network in PyTorch")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_a_recorded_module_does_what_it_does_unrecorded(scenario: Scenario) -> None:
    found, buffers, module = [], [], Network()
    for options in (PLAIN, RECORDED):
        model = ORTModule(copy.deepcopy(module), options=options)
        torch.manual_seed(5)
        found.append([*scenario(model)])
        buffers.append([*model.buffers()])
    for mine, its in zip(*found, strict=True):
        assert torch.equal(mine, its)
    for mine, its in zip(*buffers, strict=True):
        assert torch.equal(mine, its)
    if scenario is not run_again:
        assert model.report.replays is not None
        assert model.report.replays.replayed > 0
    assert not model.report.replays.refused


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_backward_in_pieces_is_replayed(pieces: int) -> None:
    options = Options(engine="aten", fallback="raise", cuda_graphs=True, backward_pieces=pieces)
    plain = Network(0.0)
    model = ORTModule(copy.deepcopy(plain), options=options)
    for number in range(12):
        for module in (plain, model):
            module.zero_grad()
            module(*batch(module, 4, number)).square().mean().backward()
        for mine, its in zip(gradients(model), gradients(plain), strict=True):
            torch.testing.assert_close(mine, its)
    replays = model.report.replays
    assert replays is not None
    assert replays.recorded == 1 + pieces
    assert "runs replayed" in str(model.report)


def test_what_users_have_as_well_is_copied_for_the_backward() -> None:
    """The gradient of tanh reads what the module returns."""
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
    model = ORTModule(copy.deepcopy(module), options=RECORDED)
    for number in range(6):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        for each in (module, model):
            each.zero_grad()
            y = each(x)
            y.sum().backward()
        for mine, its in zip(gradients(model), gradients(module), strict=True):
            torch.testing.assert_close(mine, its)
    assert model.report.replays is not None
    assert model.report.replays.recorded == 2


@pytest.mark.parametrize("scenario", [one_size, many_sizes, two_forwards])
def test_what_is_drawn_on_a_device_is_what_the_host_draws(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, module = [], Network()
    for there in (False, True):
        monkeypatch.setattr(hash, "on_device", lambda device, there=there: there)
        torch.manual_seed(5)
        model = ORTModule(copy.deepcopy(module), options=PLAIN)
        found.append([*scenario(model)])
    assert all(map(torch.equal, *found))


class Shifts(TorchDispatchMode):
    """Counts an operator that nothing but mixing has."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += "__rshift__" in str(function) or "right_shift" in str(function)
        return function(*args, **(kwargs or {}))


def test_a_device_mixes_the_numbers_of_all_draws_of_a_program_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ortrain.runtime.aten.hash._TOGETHER", 1 << 14)
    dropouts = nn.Sequential(*[nn.Dropout(0.1 * i) for i in range(1, 6)])
    executor = AtenExecutor()
    program = export(dropouts, (torch.ones(5, 6),)).program
    compiled = executor.compile(executor.lower(program))
    with Shifts() as shifts:
        compiled.run([np.ones((5, 6), np.float32), np.array(7)])
    assert shifts.count == 3, "those of one mix"


def test_a_program_that_reads_a_value_runs_as_it_is_and_the_report_says_why() -> None:
    class Reading(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x > 0] * 2

    model = ORTModule(Reading(), options=RECORDED)
    for number in range(5):
        x = torch.randn(7, generator=torch.Generator().manual_seed(number))
        assert torch.equal(model(x), x[x > 0] * 2)
    assert model.report.replays is not None
    assert model.report.replays.replayed == 0
    assert "depend" in str(model.report.replays) or "mask" in str(model.report.replays)
    assert "the forward is never recorded" in str(model.report)


def test_a_failed_recording_leaves_the_function_as_it_was(card: Card) -> None:
    card.fails = "capture is not allowed\nand a long story"
    module = Network()
    found = []
    for options in (PLAIN, RECORDED):
        model = ORTModule(copy.deepcopy(module), options=options)
        torch.manual_seed(5)
        found.append([*steps(model, [4] * 5)])
    assert all(map(torch.equal, *found))
    assert model.report.replays is not None
    refused = model.report.replays.refused
    assert refused == {"the forward": "RuntimeError: capture is not allowed"}


def test_nothing_is_recorded_or_replayed_inside_of_another_recording(card: Card) -> None:
    model = ORTModule(Network(), options=RECORDED)
    card.capturing = True
    [*steps(model, [4] * 4)]
    assert card.recorded == 0


def test_few_recordings_are_kept_and_the_longest_unused_makes_way(card: Card) -> None:
    module = nn.Linear(3, 2)
    model = ORTModule(module, options=RECORDED)
    with torch.no_grad():
        for _ in range(3):
            for rows in range(2, 2 + MOST + 3):
                model(torch.ones(rows, 3))
        assert card.recorded == MOST, "others are in use"
        for _ in range(RESTED):
            model(torch.ones(2, 3))
        for _ in range(3):
            last = 2 + MOST + 1
            assert torch.equal(model(torch.ones(last, 3)), module(torch.ones(last, 3)))
        assert card.recorded == MOST + 1
        for _ in range(3):
            model(torch.ones(2, 3))
        assert card.recorded == MOST + 1, "the one that was used last has stayed"


READS: list[Callable[[Tensor], object]] = [
    lambda x: x.sum().item(),
    lambda x: bool((x > 0).any()),
    lambda x: int(x[0]),
    lambda x: x.nonzero(),
    lambda x: x[x > 0],
    lambda x: x.masked_select(x > 0),
    lambda x: x.clone().index_put_((x > 0,), torch.ones(())),
    lambda x: x.unique(),
    lambda x: torch.equal(x, x),
    lambda x: x.repeat_interleave((x > 0).long()),
    lambda x: torch.empty(3, device="meta").copy_(x),
    lambda x: x.to("meta"),
    lambda x: torch.rand_like(x),
    lambda x: nn.functional.dropout(x),
    lambda x: nn.functional.scaled_dot_product_attention(*[x.view(1, 1, 3, 1)] * 3, dropout_p=0.1),
]
KEEPS: list[Callable[[Tensor], object]] = [
    lambda x: x[(x > 0).long()],
    lambda x: x.clone().index_put_(((x > 0).long(),), torch.ones(())),
    lambda x: torch.where(x > 0, x, 0.0),
    lambda x: x.cumsum(0).sort(),
    lambda x: torch.full((2, 3), 1.5) + x.max(),
    lambda x: x.expand(4, 3).reshape(-1).view(3, 4),
    lambda x: nn.functional.scaled_dot_product_attention(*[x.view(1, 1, 3, 1)] * 3),
]


@pytest.mark.parametrize("function", READS, ids=range(len(READS)))
def test_what_reads_values_is_seen(function: Callable[[Tensor], object]) -> None:
    with pytest.raises(Unrecordable), Watch(torch.device("cpu")):
        function(torch.tensor([1.0, -2.0, 3.0]))


@pytest.mark.parametrize("function", KEEPS, ids=range(len(KEEPS)))
def test_what_stays_on_the_device_is_left_alone(function: Callable[[Tensor], object]) -> None:
    x = torch.tensor([1.0, -2.0, 3.0])
    with Watch(torch.device("cpu")):
        function(x)


def test_a_capture_follows_a_run_aside_and_clears_workspaces(card: Card) -> None:
    recorder = CudaRecorder(torch.device("cpu"))

    def function(values: list[Tensor]) -> list[Tensor]:
        card.calls.append(f"runs on {card.current.name}")
        (x,) = values
        values.clear()
        return [x * 2]

    exported = ["synchronize", "empty_cache", "clear", "begin", "runs on side", "end", "clear"]
    around = ["side waits for main", "runs on side", "main waits for side", *exported]
    x = torch.ones(2)
    replay, (y,) = recorder.record(function, [x])
    replay()
    assert y.tolist() == [2, 2]
    anchor = [call for call in exported if not call.startswith("runs")]
    assert card.calls == [*anchor, *around]
    card.calls.clear()
    recorder.record(function, [torch.ones(2)])
    assert card.calls == around


def test_a_capture_that_fails_restores_the_stream_and_changes_the_pool(card: Card) -> None:
    recorder = CudaRecorder(torch.device("cpu"))
    recorder.record(lambda values: [values[0] * 2], [torch.ones(2)])
    place = recorder._place
    card.fails = "operation failed due to a previous error during capture"
    with pytest.raises(RuntimeError, match="previous error"):
        recorder.record(lambda values: [values[0] * 2], [torch.ones(2)])
    assert card.current.name == "main"
    card.fails = ""
    recorder.record(lambda values: [values[0] * 2], [torch.ones(2)])
    assert recorder._place is not None
    assert place is not None
    assert recorder._place.pool is not place.pool
    with pytest.raises(Unrecordable):
        recorder.record(lambda values: [values[0][values[0] > 0]], [torch.ones(2)])
    assert card.current.name == "main"
    assert card.calls[-2:] == ["side waits for main", "main waits for side"], "nothing else"


def test_recordings_of_several_streams_follow_each_other(card: Card) -> None:
    recorder = CudaRecorder(torch.device("cpu"))
    streams = [Stream(card, name) for name in "ab"]
    for stream in (streams[0], streams[0], streams[1], streams[1], streams[0]):
        with card.stream(stream), recorder.ordered():
            pass
    assert card.calls == ["b waits for a", "a waits for b"]

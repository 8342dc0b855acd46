"""A short run is not made slower: no graph is made before one is likely to pay."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from ortrain import Options, ORTModule
from ortrain.step import marks
from ortrain.step.prospect import (
    GAIN,
    GAIN_OF_NARROW,
    OF_CONVOLUTIONS,
    OF_RECURRENT,
    gain_of,
    share_of,
)


@pytest.fixture(autouse=True)
def no_waiting() -> None:
    """A graph is made when it pays, as outside of tests."""


class Clock:
    """A second passes at each look."""

    def __init__(self, tick: float) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def steps(model: ORTModule, count: int) -> None:
    for _ in range(count):
        model(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize(
    ("maker", "family", "wide"),
    [
        ("AuthenticAMD", "26", 0.5), ("AuthenticAMD", "25", 0.2), ("AuthenticAMD", "", 0.2),
        ("GenuineIntel", "6", 0.2), ("", "", GAIN), ("ARM", "", GAIN),
    ],
)  # fmt: skip
def test_what_is_to_be_gained_goes_by_precision_and_processor(
    monkeypatch: pytest.MonkeyPatch, maker: str, family: str, wide: float
) -> None:
    known = {"vendor_id": maker, "cpu family": family}
    monkeypatch.setattr("ortrain.step.prospect.cpuinfo", lambda: known)
    assert gain_of({torch.float32, torch.int64, torch.bool}) == wide
    assert gain_of({torch.float64}) == wide
    for narrow in (torch.bfloat16, torch.float16):
        assert gain_of({torch.float32, narrow}) == GAIN_OF_NARROW
    assert gain_of({torch.int16}) == wide
    assert gain_of({torch.bfloat16}, torch.device("cuda")) == GAIN


def test_layers_that_run_the_same_kernels_in_a_graph_save_little() -> None:
    assert share_of(nn.Linear(4, 4)) == 1.0
    assert share_of(nn.Conv1d(4, 4, 3)) == OF_CONVOLUTIONS
    assert share_of(nn.LSTM(4, 4)) == OF_RECURRENT
    both = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Conv2d(10, 10, 1, bias=False))
    assert share_of(both) == pytest.approx((1 + OF_CONVOLUTIONS) / 2)
    assert share_of(nn.Sequential(nn.Embedding(1000, 4), nn.Linear(4, 4))) == 1.0
    assert share_of(nn.ReLU()) == 1.0


def test_a_short_run_is_never_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ORTModule(nn.Linear(3, 2))
    monkeypatch.setattr(marks, "clock", Clock(1e-6))
    steps(model, 400)
    assert model.report.captures == 0
    assert model.report.contest is not None
    assert model.report.contest.waits
    assert "too short" in str(model.report)


def test_a_long_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ORTModule(nn.Linear(3, 2))
    monkeypatch.setattr(marks, "clock", Clock(0.01))
    for _ in itertools.takewhile(lambda _: not model.report.captures, range(1000)):
        steps(model, 1)
    assert model.report.captures == 1


def test_steps_to_come_decide_for_a_loop_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "clock", Clock(0.001))
    for left, captures in ((10, 0), (1_000_000, 1)):
        model = ORTModule(nn.Linear(3, 2))
        model.steps_to_come = left
        steps(model, 200)
        assert model.steps_to_come == left
        assert model.report.captures == captures


def test_a_chosen_engine_waits_for_nothing() -> None:
    model = ORTModule(nn.Linear(3, 2), options=Options(engine="onnxruntime"))
    steps(model, 1)
    assert model.report.captures == 1

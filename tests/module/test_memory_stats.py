"""What a step holds is printed where it is asked for, with the numbers of the call."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from torch import nn

import ortrain
from ortrain import DebugOptions, Options, ORTModule

PRINT = "ORTMODULE_PRINT_MEMORY_STATS"
LINE = re.compile(r"ORTModule step (\d+): ([\d.]+) MiB kept for the backward, ([\d.]+) MiB at most")


@pytest.fixture(params=["aten", "onnxruntime"])
def options(request: pytest.FixtureRequest) -> Options:
    return Options(engine=request.param, fallback="raise")


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def told(text: str) -> list[tuple[int, float, float]]:
    return [(int(step), float(kept), float(most)) for step, kept, most in LINE.findall(text)]


def test_steps_tell_what_they_hold_at_their_own_sizes(
    options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    module = layers()
    memory = ortrain.explain(module, torch.randn(1024, 64), options=options).memory
    assert memory is not None
    model = ORTModule(module, DebugOptions(print_memory_stats=True), options=options)
    for rows in (1024, 2048):
        model(torch.randn(rows, 64)).square().sum().backward()
    text = capsys.readouterr().err
    assert ("the process takes" in text) == sys.platform.startswith("linux")
    for number, (step, kept, most) in enumerate(told(text), 1):
        assert step == number
        expected = memory.peak(**{memory.batch: 1024 * number}) / 2**20
        assert most == pytest.approx(expected, abs=0.06)
        assert 0 < kept <= most


def test_steps_beyond_the_first_have_a_line_at_powers_of_two(
    options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ORTModule(layers(), DebugOptions(print_memory_stats=True), options=options)
    x = torch.randn(2, 64)
    for _ in range(33):
        model(x).sum().backward()
    with torch.no_grad():
        model(x)
    assert [step for step, _, _ in told(capsys.readouterr().err)] == [*range(1, 10), 16, 32]


def test_the_environment_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not DebugOptions().print_memory_stats
    monkeypatch.setenv(PRINT, "1")
    assert DebugOptions(print_memory_stats=False).print_memory_stats
    assert DebugOptions.of(DebugOptions().plain()).print_memory_stats

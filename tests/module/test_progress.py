"""Who waits for a capture is told."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import DebugOptions, LogLevel, ORTModule
from ortrain.step import progress
from tests.module.agreement import GRAPH


class Waits(nn.Module):
    """Its forward takes until a line was printed, or nothing is going to be."""

    def __init__(self, printed: threading.Event) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.printed = [printed]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.printed[0].wait(10)
        return self.linear(x)


class Lines:
    """A stream that tells when something was written."""

    def __init__(self) -> None:
        self.text, self.written = "", threading.Event()

    def write(self, text: str) -> None:
        self.text += text
        self.written.set()

    def flush(self) -> None:
        pass


def lines_of(monkeypatch: pytest.MonkeyPatch) -> Lines:
    stream = Lines()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(progress, "FIRST", 0.01)
    return stream


def test_a_capture_that_takes_long_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_of(monkeypatch)
    ORTModule(Waits(lines.written), options=GRAPH)(torch.ones(2, 3))
    assert lines.text.startswith("ortrain: capturing Waits … 0 s\n")


def test_at_a_higher_log_level_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_of(monkeypatch)
    quiet: Any = DebugOptions(log_level=LogLevel.ERROR)
    done = threading.Event()
    done.set()
    ORTModule(Waits(done), quiet, options=GRAPH)(torch.ones(2, 3))
    assert lines.text == ""


def test_the_thread_ends_with_what_it_tells_of() -> None:
    before = threading.active_count()
    with progress.progress("waiting", shown=True):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="mine"), progress.progress("failing", shown=True):
        raise ValueError("mine")
    assert threading.active_count() == before

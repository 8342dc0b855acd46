from __future__ import annotations

import io
import itertools

import pytest

from ortrain.cli.progress import Progress, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def clock_of(seconds: float) -> itertools.count[float]:
    return itertools.count(100.0, seconds)


def test_a_terminal_gets_one_line_that_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    progress = Progress(stream, 200, clock=clock_of(2.0).__next__)
    progress.update(1, 0.75, 32)
    progress.update(2, 0.5, 32)
    progress.close()
    assert stream.getvalue() == (
        "\rstep   1/200  loss 0.7500  16.0 samples/s  6:38 left\x1b[K"
        "\rstep   2/200  loss 0.5000  16.0 samples/s  6:36 left\x1b[K\n"
    )


def test_a_line_is_cut_to_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "12")
    stream = Terminal()
    Progress(stream, 2, clock=clock_of(1.0).__next__).update(1, 0.75, 32)
    assert stream.getvalue() == "\rstep 1/2  l\x1b[K"


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["file", "dumb terminal"])
def test_elsewhere_a_line_is_written_now_and_then_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    progress = Progress(stream, 8, seconds_between=5.0, clock=clock_of(2.0).__next__)
    for step in range(1, 9):
        progress.update(step, 1 / step, 4)
    progress.close()
    assert stream.getvalue() == (
        "step 3/8  loss 0.3333  2.0 samples/s  0:10 left\n"
        "step 6/8  loss 0.1667  2.0 samples/s  0:04 left\n"
        "step 8/8  loss 0.1250  2.0 samples/s  0:00 left\n"
    )


def test_the_slow_first_step_leaves_the_rate_after_twenty_more() -> None:
    times = iter([0.0, 100.0, *(100.0 + second for second in range(1, 21))])
    stream = io.StringIO()
    progress = Progress(stream, 21, seconds_between=1e9, clock=times.__next__)
    for step in range(1, 22):
        progress.update(step, 0.0, 8)
    assert "8.0 samples/s" in stream.getvalue()


def test_a_resumed_run_does_not_count_what_was_done_before() -> None:
    stream = io.StringIO()
    progress = Progress(stream, 12, done=10, seconds_between=0.0, clock=clock_of(3.0).__next__)
    progress.update(11, 0.0, 6)
    assert stream.getvalue() == "step 11/12  loss 0.0000  2.0 samples/s  0:03 left\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.4, "0:59"), (59.6, "1:00"), (760, "12:40"), (11100, "3:05:00")],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text

"""Long loops are shown to who asks, on a terminal; nobody else sees them."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest

from ortrain.cli import main
from ortrain.deploy.progress import shown, tracked
from tests.deploy import classifiers


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_loop_shows_what_is_done_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with shown():
        assert [*tracked(iter("abc"), "comparing", "batch", 3)] == ["a", "b", "c"]
    assert "comparing:   0%" in sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "0/3 [00:00<?, ?batch/s]" in sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert sys.stderr.getvalue().endswith("\r")  # type: ignore[attr-defined] # and leaves nothing


def test_nothing_is_shown_unasked_or_without_a_terminal_or_without_tqdm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for stream in (io.StringIO(), Terminal()):
        monkeypatch.setattr(sys, "stderr", stream)
        assert [*tracked([1], "comparing", "batch")] == [1]
        with shown():
            if stream.isatty():
                monkeypatch.setitem(sys.modules, "tqdm", None)
            assert [*tracked([1], "comparing", "batch")] == [1]
        assert stream.getvalue() == ""


@pytest.mark.parametrize("command", ["optimize", "quantize", "validate"])
def test_the_commands_show_how_far_they_are(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = str(classifiers.folder(tmp_path / "model"))
    batches, _ = classifiers.batches(((4, 5),))
    examples = str(tmp_path / "examples.npz")
    np.savez(examples, allow_pickle=False, **batches[0])  # type: ignore[arg-type]
    out = ["-o", str(tmp_path / "out"), "--validate", examples]
    options, seen = {
        "optimize": (["-O1", *out], {"optimizing", "comparing", "timing", "measuring memory"}),
        "quantize": (
            ["--preset", "avx2", "--static", "--calibrate", examples, *out],
            {"calibrating", "quantizing", "comparing", "timing"},
        ),
        "validate": ([model, "--data", examples], {"comparing", "timing", "measuring memory"}),
    }[command]
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert main([command, model, *options]) == 0
    told = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert {what for what in seen if f"{what}:" in told} == seen

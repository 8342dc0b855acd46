"""What is read is a regular file: what else there may be is named, with what to do."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from ortrain.deploy import EquivalenceReport, ORTConfig
from ortrain.deploy.model_folder import load_model
from ortrain.errors import InputError
from ortrain.files.checksums import sha256
from ortrain.files.regular import expect_regular
from ortrain.json_config import settings_in
from ortrain.ondevice import CheckpointState
from ortrain.ondevice.making.onnx_source import read
from ortrain.program import Program


def test_a_regular_file_passes_also_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    assert expect_regular(tmp_path / "link") == tmp_path / "link"
    assert expect_regular(tmp_path / "none") == tmp_path / "none"  # who opens it says so


def test_a_file_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(InputError, match=r"file may not be read\n.*change its permissions"):
        expect_regular(tmp_path / "file")


LOADERS: dict[str, Callable[[Path], object]] = {
    "a checkpoint": CheckpointState.load_checkpoint,
    "a program": Program.load,
    "a model": load_model,
    "a model to train": read,
    "a configuration": ORTConfig.from_pretrained,
    "a report": EquivalenceReport.load,
    "settings": settings_in,
    "a checksum": sha256,
}


@pytest.mark.parametrize("what", LOADERS)
def test_a_loader_does_not_wait_for_a_pipe(what: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("waited for a pipe"))
    signal.alarm(10)
    try:
        with pytest.raises(InputError, match="is a pipe"):
            LOADERS[what](tmp_path / "pipe")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)

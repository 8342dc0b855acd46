"""A finished run is whole and in its place, or beside it, whatever happens meanwhile."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ortrain.cli.text_classification import job
from ortrain.cli.text_classification.output import Output
from ortrain.cli.usage import UsageError
from ortrain.files import checksums
from ortrain.files.lock import Lock
from tests.cli.conftest import Run


def _whole(directory: Path) -> bool:
    checksums.check(directory, whole=True)
    return checksums.is_written(directory) and not (directory / "checkpoint").exists()


def _during(monkeypatch: pytest.MonkeyPatch, happen: Callable[[], object]) -> None:
    """Lets something happen when all is trained, before the result is put in its place."""
    write = job.write_report

    def written(*arguments: Any) -> None:
        write(*arguments)
        happen()

    monkeypatch.setattr(job, "write_report", written)


@pytest.mark.parametrize("there", [False, True])
def test_a_link_is_followed(train: Run, output: Path, tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "place").mkdir()
    output.symlink_to(tmp_path / "place")
    assert train() == 0
    assert output.is_symlink()
    assert _whole(tmp_path / "place")


TAKEN: dict[str, Callable[[Path], object]] = {
    "a file": lambda path: path.write_text("mine"),
    "a folder": lambda path: (path / "mine").mkdir(parents=True),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to a folder": lambda path: path.symlink_to(path.parent),
}


@pytest.mark.parametrize("what", TAKEN)
def test_a_result_whose_place_is_taken_is_kept_beside_it(
    what: str,
    train: Run,
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (output.with_name("out.finished-2")).mkdir(parents=True)
    (output.with_name("out.finished-2") / "older").touch()
    _during(monkeypatch, lambda: TAKEN[what](output))
    assert train() == 0
    assert _whole(output.with_name("out.finished-3"))
    printed = capsys.readouterr()
    assert f"{output}: is taken meanwhile; the result is in {output}.finished-3" in printed.err
    assert f"report.md are in {output}.finished-3" in printed.out
    assert not checksums.is_written(output)


def test_an_empty_folder_that_appears_is_welcome(
    train: Run, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _during(monkeypatch, output.mkdir)
    assert train() == 0
    assert _whole(output)


def test_a_rename_that_fails_leaves_the_result_to_resume(
    train: Run,
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(path: Path, target: Path) -> Path:
        raise OSError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        assert train() == 2
    (line,) = [row for row in capsys.readouterr().err.splitlines() if "error" in row]
    assert "the result cannot be put into" in line
    assert "with --resume to finish" in line
    assert train() == 2
    assert "add --resume to give it its name" in capsys.readouterr().err
    assert train("--resume") == 0
    assert f"{output}: is complete" in capsys.readouterr().out
    assert _whole(output)
    assert [path.name for path in output.parent.glob("*out*")] == ["out"]


def test_a_result_that_was_damaged_before_its_rename_is_made_again(
    train: Run, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "bad")))
        assert train() == 2
    (output.with_name("out.unfinished") / "model.safetensors").write_bytes(b"damaged")
    assert train("--resume") == 0
    assert _whole(output)


def test_what_a_kill_after_the_rename_left_is_finished(
    train: Run, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = shutil.rmtree

    def stopped(path: Path, *arguments: Any, **more: Any) -> None:
        if Path(path).name != "checkpoint":
            remove(path, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", stopped)
        assert train() == 0
    assert (output / "checkpoint" / "state.pt").exists()
    assert train("--resume") == 0
    assert _whole(output)


def test_two_processes_do_not_write_one_directory(
    train: Run, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = Lock(output.with_name(".out.lock"))
    assert lock.take()
    for arguments in ((), ("--resume",)):
        assert train(*arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"process {os.getpid()} is writing it" in line
        assert not output.with_name("out.unfinished").exists()
    lock.release()
    assert train() == 0


def test_what_a_run_left_that_was_killed_before_its_first_checkpoint_goes(
    train: Run, output: Path
) -> None:
    folder = output.with_name("out.unfinished") / "checkpoint"
    folder.mkdir(parents=True)
    for name in ("state.new", ".state.pt.01234567.tmp"):
        (folder / name).write_bytes(b"half")
    assert train() == 0
    assert _whole(output)
    assert not folder.parent.exists()


def test_files_of_the_users_beside_it_are_not_taken_for_ours(train: Run, output: Path) -> None:
    mine = output.with_name("out.unfinished") / "mine"
    mine.parent.mkdir()
    mine.write_text("thesis")
    assert train() == 2
    assert mine.read_text() == "thesis"


@pytest.mark.parametrize("name", ["", ".", "..", "/", "a/..", "n" * 250, "a\0b", "file/out"])
def test_a_name_that_cannot_be_a_directory_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = Path(name) if name in ("", ".", "/") else tmp_path / name
    with pytest.raises(UsageError, match="--output"):
        Output(path)


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UsageError, match="--output"):
        Output(tmp_path / "loop")


def test_weights_that_are_not_finite_are_not_saved(
    train: Run, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--learning-rate", "1e38", "--checkpoint-every", 1) == 2
    assert "lower --learning-rate" in capsys.readouterr().err
    assert not output.with_name("out.unfinished").exists()

"""``ortrain ondevice run`` keeps what was trained, and refuses what is damaged."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ortrain.cli import main
from ortrain.cli.ondevice.loop import arrays
from ortrain.errors import InputError
from ortrain.files.lock import Lock
from ortrain.ondevice import CheckpointState, TrainStep, optim
from ortrain.ondevice.artifacts import LossType, generate_artifacts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts of a small network, and 24 rows of data."""
    place = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    generate_artifacts(
        torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(), torch.nn.Linear(4, 2)),
        loss=LossType.MSELoss,
        optimizer=optim.AdamW(),
        artifact_directory=place,
        example_inputs=[torch.zeros(2, 3)],
    )
    rows = np.random.default_rng(0).standard_normal((24, 5)).astype(np.float32)
    state = CheckpointState.load_checkpoint(place / "checkpoint")
    names = TrainStep(place / "train_step_model.onnx", state)._run.model.inputs
    x, y = list(names)[:2]
    np.savez(place / "data.npz", **{x: rows[:, :3], y: rows[:, 3:]})
    np.savez(place / "nan.npz", **{x: rows[:, :3], y: rows[:, 3:] * np.nan})
    np.savez(place / "other.npz", **{x: rows[:, 1:4], y: rows[:, 3:]})
    return place


def run(folder: Path, checkpoint: Path, *more: object, data: str = "data.npz") -> int:
    words = ["ondevice", "run", folder, "--data", folder / data, "--checkpoint", checkpoint]
    return main([str(word) for word in (*words, "--batch-size", 4, "--epochs", 2, *more)])


def line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of an error."""
    (found,) = capsys.readouterr().err.splitlines()
    return found


def test_a_trained_checkpoint_is_not_overwritten(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "trained"
    assert run(folder, checkpoint) == 0
    whole = checkpoint.read_bytes()
    assert run(folder, checkpoint) == 2
    assert "exists already" in line(capsys)
    assert checkpoint.read_bytes() == whole
    assert run(folder, checkpoint, "--resume") == 0
    assert checkpoint.read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir()] == ["trained"]


def test_the_artifacts_own_checkpoint_is_not_either(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, folder / "checkpoint") == 2
    assert "exists already" in line(capsys)


def test_a_loss_that_is_not_finite_ends_the_training(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "trained"
    assert run(folder, checkpoint, data="nan.npz") == 2
    assert "the loss of batch 1 is nan" in line(capsys)
    assert not checkpoint.exists()
    assert run(folder, checkpoint, "--learning-rate", "1e38", "--checkpoint-every", 1) == 2
    assert "training has diverged" in line(capsys)
    if checkpoint.exists():  # of before
        state = CheckpointState.load_checkpoint(checkpoint)
        assert all(np.isfinite(parameter.data).all() for _, parameter in state.parameters)


@pytest.mark.parametrize(
    ("more", "data", "named"),
    [
        (("--seed", 5), "data.npz", "--seed is 5, and was 0"),
        ((), "other.npz", "--data is another file"),
    ],
)
def test_it_resumes_with_what_it_was_begun_with(
    folder: Path,
    tmp_path: Path,
    more: tuple[object, ...],
    data: str,
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint = tmp_path / "trained"
    assert run(folder, checkpoint) == 0
    capsys.readouterr()
    assert run(folder, checkpoint, "--resume", *more, data=data) == 2
    assert named in line(capsys)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_keeps_the_last_update(
    folder: Path,
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    number = getattr(signal, name, None)
    if number is None:
        pytest.skip(f"the system has no {name}")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(folder, whole) == 0
    original, calls = TrainStep.__call__, 0

    def called(self: Any, *inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 8:
            os.kill(os.getpid(), number)
        return original(self, *inputs)

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "__call__", called)
        capsys.readouterr()
        assert run(folder, broken) == 128 + number
    assert f"interrupted; the last checkpoint is {broken}" in line(capsys)
    assert CheckpointState.load_checkpoint(broken).step == 8
    assert run(folder, broken, "--resume") == 0
    assert broken.read_bytes() == whole.read_bytes()


def test_two_processes_do_not_write_one_checkpoint(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = Lock(tmp_path / ".trained.lock")
    assert lock.take()
    assert run(folder, tmp_path / "trained") == 2
    assert f"process {os.getpid()} is writing it" in line(capsys)
    lock.release()


@pytest.mark.parametrize(
    "checkpoint", ["", ".", "/", "none/trained", "n" * 300, "a\0b", "/dev/null"]
)
def test_a_checkpoint_that_cannot_be_is_refused(
    checkpoint: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        status = run(folder, checkpoint or Path())
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert "--checkpoint" in line(capsys)
    assert not [*tmp_path.iterdir()]


def test_damaged_arrays_are_one_error(tmp_path: Path) -> None:
    stream = io.BytesIO()
    np.savez_compressed(stream, x=np.arange(60, dtype=np.float32).reshape(6, 10))
    whole = stream.getvalue()
    file = tmp_path / "data.npz"
    for end in range(len(whole)):
        file.write_bytes(whole[:end])
        with pytest.raises(InputError, match="cannot read"):
            arrays(file, ["x"])
    expected = np.arange(60, dtype=np.float32).reshape(6, 10)
    for bit in range(0, 8 * len(whole), 3):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        try:
            found = arrays(file, ["x"])["x"]
        except InputError:
            continue
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("path", ["/dev/zero", ".", "none.npz"])
def test_what_holds_no_arrays_is_refused(path: str) -> None:
    with pytest.raises(InputError, match=r"cannot read|is a directory|is a device"):
        arrays(Path(path), ["x"])

"""What is no regular file ends a command in one line: none waits for it, or reads without end."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest

from ortrain.cli import main
from tests.deploy import classifiers


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def _loop(path: Path) -> None:
    path.with_name("other").symlink_to(path)
    path.symlink_to(path.with_name("other"))


def _closed(path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read every file")
    path.touch(mode=0)


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": _socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "directory": Path.mkdir,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "circle of links": _loop,
    "closed": _closed,
}
# Where X is the file, M a model's folder, E examples, T a checkpoint of transformers.
COMMANDS = (
    "check X.onnx",
    "check --seal X.onnx",
    "optimize X.onnx -o out -O1",
    "optimize M -o out -O1 --validate X.csv",
    "optimize M -o out -O1 --validate X.npz",
    "quantize X.onnx -o out --preset avx2",
    "quantize M -o out --preset avx2 --static --calibrate X.npz",
    "quantize M -o out --preset avx2 --validate E --on-fail recover --train X.jsonl",
    "validate X.onnx M --data E",
    "validate M X.onnx --data E",
    "validate M M --data X.jsonl",
    "artifacts X.onnx -o out",
    "ondevice run artifacts --data X.npz",
    "ondevice run artifacts --data E --eval X.npz",
    "train text-classification --model T --train X.csv --eval X.csv --output out",
    "train text-classification --model T --train R --eval X.jsonl --output out",
    "run X.py",
)


@contextmanager
def seconds(limit: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError(f"waited for {limit} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(limit)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    classifiers.folder(tmp_path / "model")
    batches, labels = classifiers.batches(((4, 5),))
    arrays = {**batches[0], "labels": labels}
    np.savez("examples.npz", allow_pickle=False, **arrays)  # type: ignore[arg-type]
    Path("rows.csv").write_text("text,label\ngood,yes\nbad,no\n")
    options = ["--train", "weight", "--loss", "CrossEntropyLoss"]
    assert main(["artifacts", "model/model.onnx", "-o", "artifacts", *options]) == 0
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_a_command_ends_in_one_line(
    kind: str, place: Path, tiny_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    known = {"M": "model", "E": "examples.npz", "R": "rows.csv", "T": str(tiny_model)}
    for number, command in enumerate(COMMANDS):
        words = [known.get(word, word) for word in command.split()]
        (name,) = {word.replace("X", f"x{number}") for word in words if word.startswith("X.")}
        KINDS[kind](Path(name))
        if kind == "directory" and command.startswith("check X"):
            continue  # which looks at the files in it
        with seconds(20):
            try:
                status = main([word.replace("X.", f"x{number}.") for word in words])
            except SystemExit as end:
                status = end.code  # type: ignore[assignment]
        line = capfd.readouterr().err.splitlines()[-1]
        assert status == 2, (command, line)
        assert "error: " in line, command
        assert name in line, (command, line)
        Path("other").unlink(missing_ok=True)
    assert not Path("out").exists()


@pytest.mark.parametrize("inside", ["config.json", "model.onnx_data", "SHA256SUMS"])
def test_what_is_within_a_folder_is_looked_at_as_well(
    inside: str, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = place / "model" / "model.onnx"
    onnx.save(
        onnx.load(model), model, save_as_external_data=True, location="model.onnx_data",
        size_threshold=0,
    )  # fmt: skip
    (place / "model" / inside).unlink(missing_ok=True)
    os.mkfifo(place / "model" / inside)
    command = ["check", "model"] if inside == "SHA256SUMS" else ["optimize", "model", "-o", "out"]
    with seconds(20):
        assert main([*command, *([] if command[0] == "check" else ["-O1"])]) == 2
    said = capfd.readouterr()
    assert inside in said.out + said.err

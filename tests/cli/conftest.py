"""A tiny pretrained model and small files to train it on."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from ortrain.cli import main
from tests.cli.tiny import make_model

Run = Callable[..., int]


@pytest.fixture(scope="session", autouse=True)
def signals_are_not_ignored() -> None:
    """As in a shell's foreground: in its background, and under nohup, they would be."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a two-layer BERT of width 16, with the dropout of the real ones."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_model(directory)
    return directory


@pytest.fixture
def training_file(tmp_path: Path) -> Path:
    """Ten examples of two labels."""
    path = tmp_path / "train.csv"
    rows = [
        f"the {noun} was {adjective},{label}"
        for noun in ("film", "plot")
        for adjective, label in (
            ("good", "yes"),
            ("fine", "yes"),
            ("bad", "no"),
            ("poor", "no"),
            ("awful", "no"),
        )
    ]
    path.write_text("\n".join(["text,label", *rows]) + "\n")
    return path


@pytest.fixture
def evaluation_file(tmp_path: Path) -> Path:
    """Two examples, one of each label."""
    path = tmp_path / "eval.csv"
    path.write_text("text,label\na great film,yes\na poor plot,no\n")
    return path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Where runs write to; not there yet."""
    return tmp_path / "out"


@pytest.fixture
def train(tiny_model: Path, training_file: Path, evaluation_file: Path, output: Path) -> Run:
    """Runs ``ortrain train text-classification`` and returns its status.

    Three steps an epoch, two epochs; options given later replace the ones here.
    """

    def run(*options: object) -> int:
        return main(
            [
                *("train", "text-classification"),
                *("--model", str(tiny_model)),
                *("--train", str(training_file)),
                *("--eval", str(evaluation_file)),
                *("--output", str(output)),
                *("--engine", "torch"),
                *("--epochs", "2"),
                *("--batch-size", "4"),
                *("--learning-rate", "0.01"),
                *("--max-length", "8"),
                "--no-onnx",
                *map(str, options),
            ]
        )

    return run

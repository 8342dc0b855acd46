"""The commands that make artifacts and train them, on scikit-learn's digits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.numpy import load_file
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from ortrain.cli import main
from ortrain.ondevice import Module, TrainStep
from tests.ondevice.making.test_artifacts import exported

SPLIT, SEED = 0.25, 0


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small CNN's file, three quarters of the digits, and the rest."""
    folder = tmp_path_factory.mktemp("digits")
    found = load_digits()
    images = (found.images / 16).astype(np.float32)[:, None]
    labels = found.target.astype(np.int64)
    parts = train_test_split(images, labels, test_size=SPLIT, random_state=SEED, stratify=labels)
    for name, i in (("train", 0), ("test", 1)):
        np.savez(folder / f"{name}.npz", image=parts[i], labels=parts[i + 2])
    torch.manual_seed(SEED)
    module = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(16 * 16, 10),
    )
    names = {"input_names": ["image"], "output_names": ["logits"]}
    names["dynamic_axes"] = {"image": {0: "batch"}}  # type: ignore[assignment]
    exported(module, torch.tensor(parts[0][:4]), folder / "model.onnx", **names)
    return folder


@pytest.fixture(scope="module")
def artifacts(digits: Path) -> Path:
    """Made by the command."""
    folder = digits / "artifacts"
    command = ["artifacts", digits / "model.onnx", "--loss", "CrossEntropyLoss"]
    assert ortrain(*command, "--outputs", "logits", "-o", folder) == 0
    return folder


def ortrain(*words: Any) -> int:
    return main([str(word) for word in words])


def run(artifacts: Path, data: Path, checkpoint: Path, *more: Any) -> int:
    return ortrain("ondevice", "run", artifacts, "--data", data, "--checkpoint", checkpoint, *more)


def test_a_small_network_learns_the_digits(
    artifacts: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inference = tmp_path / "inference.onnx"
    options = ["--epochs", 20, "--learning-rate", 0.005, "--decay", "--warmup-steps", 20]
    options += ["--eval", digits / "test.npz", "--inference", inference]
    assert run(artifacts, digits / "train.npz", tmp_path / "trained", *options) == 0
    found = re.findall(r"evaluation loss (\S+)", capsys.readouterr().out)
    assert len(found) == 20
    test = np.load(digits / "test.npz")
    session = onnxruntime.InferenceSession(inference)
    (logits,) = session.run(["logits"], {"image": test["image"]})
    assert (logits.argmax(1) == test["labels"]).mean() >= 0.97
    loss = nn.functional.cross_entropy(torch.tensor(logits), torch.tensor(test["labels"]))
    assert float(found[-1]) == pytest.approx(loss.item(), abs=1e-4)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_interrupted_training_goes_on_to_the_same_bits(
    artifacts: Path,
    digits: Path,
    tmp_path: Path,
    accumulate: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--epochs", 2, "--batch-size", 128, "--accumulate", accumulate, "--decay"]
    options += ["--checkpoint-every", 3]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(artifacts, digits / "train.npz", whole, *options) == 0

    kind: Any = TrainStep if accumulate == 1 else Module
    original, calls = kind.__call__, 0

    def interrupted(self: Any, *inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 15:
            raise KeyboardInterrupt
        return original(self, *inputs)

    monkeypatch.setattr(kind, "__call__", interrupted)
    assert run(artifacts, digits / "train.npz", broken, *options) == 130
    assert "go on with --resume" in capsys.readouterr().err
    monkeypatch.undo()
    assert run(artifacts, digits / "train.npz", broken, *options, "--resume") == 0
    expected, found = load_file(whole), load_file(broken)
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--train", "nothing.*"], r"--train nothing.*: no weight of the model has such a name"),
        (["--outputs", "hidden"], "the model has no value 'hidden'"),
        (["--lora-rank", "2", "--lora-targets", "9.*"], "no weight of a product is named 9"),
    ],
)
def test_a_wrong_name_ends_in_one_line(
    digits: Path,
    tmp_path: Path,
    more: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["artifacts", digits / "model.onnx", "--loss", "CrossEntropyLoss", *more]
    assert ortrain(*command, "-o", tmp_path / "new") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)
    assert not (tmp_path / "new").exists()


def test_data_of_other_names_is_refused(
    artifacts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "data.npz", picture=np.zeros((4, 1, 8, 8), np.float32))
    assert run(artifacts, tmp_path / "data.npz", tmp_path / "trained") == 2
    assert "has no array image, labels" in capsys.readouterr().err
    assert not (tmp_path / "trained").exists()


def test_a_training_of_other_settings_is_not_resumed(
    artifacts: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, trained = digits / "train.npz", tmp_path / "trained"
    assert run(artifacts, data, trained, "--batch-size", 512) == 0
    before = trained.read_bytes()
    assert run(artifacts, data, trained, "--batch-size", 256, "--resume") == 2
    assert "is of another training: --batch-size is" in capsys.readouterr().err
    assert trained.read_bytes() == before

"""Standard output belongs to the commands: what libraries print there is found on stderr."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ortrain.cli.output import descriptor_to_stderr, libraries_to_stderr
from tests.cli.test_artifacts import perceptron

# Each way to fd 1 that a library has, as it opens a session.
NOISY = """
import ctypes, os, subprocess, sys
import onnxruntime

own = onnxruntime.InferenceSession.__init__

def loud(self, *args, **kwargs):
    os.write(1, b"NOISE of C++\\n")
    ctypes.CDLL(None).printf(b"NOISE of C, which a pipe gets at the end\\n")
    subprocess.run(["echo", "NOISE of a child"])
    print("NOISE of the original stream", file=sys.__stdout__)
    if {python}:
        print("NOISE of Python")
    own(self, *args, **kwargs)

onnxruntime.InferenceSession.__init__ = loud
from ortrain.cli import main
sys.exit(main(sys.argv[1:]))
"""


def ortrain(*words: object, python: bool) -> subprocess.CompletedProcess[str]:
    script = NOISY.replace("{python}", str(python))
    command = [sys.executable, "-c", script, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.skipif(sys.platform == "win32", reason="C's standard library has another name")
def test_the_commands_for_devices_say_their_own_words_alone(tmp_path: Path) -> None:
    model, data, folder = (tmp_path / name for name in ("model.onnx", "data.npz", "artifacts"))
    model.write_bytes(perceptron().SerializeToString())
    words = ("artifacts", model, "-o", folder, "--loss", "CrossEntropyLoss", "--ort-format")
    made = ortrain(*words, python=True)
    assert (made.returncode, made.stdout) == (0, f"the artifacts are in {folder}\n")
    assert made.stderr.count("NOISE") >= 5
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 8)
    np.savez(data, x=generator.standard_normal((8, 4), np.float32), labels=labels)
    words = ("ondevice", "run", folder, "--data", data, "--checkpoint", tmp_path / "trained")
    trained = ortrain(*words, python=False)
    assert trained.returncode == 0, trained.stderr
    assert "NOISE" not in trained.stdout
    assert trained.stdout.endswith(f"the checkpoint is {tmp_path / 'trained'}\n")
    assert trained.stderr.count("NOISE") >= 4
    model.write_bytes(model.read_bytes()[:100])
    refused = ortrain("artifacts", model, "-o", folder, python=True)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.count("\n") == 1


@pytest.mark.slow
def test_training_says_its_own_words_alone(
    tiny_model: Path, training_file: Path, evaluation_file: Path, output: Path
) -> None:
    words = ("train", "text-classification", "--model", tiny_model, "--train", training_file)
    words += (
        "--eval",
        evaluation_file,
        "--output",
        output,
        "--epochs",
        "1",
        "--batch-size",
        "4",
        "--max-length",
        "16",
    )
    trained = ortrain(*words, python=True)
    assert trained.returncode == 0, trained.stderr
    lines = trained.stdout.splitlines()
    assert lines[0].startswith("all weights are pretrained but a new head")
    assert lines[1] == "10 examples, 2 labels, 3 steps, engine ortrain"
    assert [line.split()[0] for line in lines[2:]] == [
        "epoch",
        "writing",
        "trained",
        "accuracy",
        "the",
    ]
    assert "NOISE of Python" in trained.stderr


def test_help_is_on_stdout() -> None:
    found = ortrain("--help", python=True)
    assert found.returncode == 0
    assert found.stdout.startswith("usage: ortrain")


def test_a_stream_of_a_tests_own_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    stream = sys.stdout
    with descriptor_to_stderr():
        assert sys.stdout is stream
        with libraries_to_stderr() as out:
            print("a library's")
            print("ours", file=out)
    assert sys.stdout is stream
    assert capsys.readouterr() == ("ours\n", "a library's\n")

"""A fine-tuned checkpoint, optimized and quantized by the commands, with the real tools."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from ortrain.cli import main
from ortrain.deploy import EquivalenceReport
from tests.cli.conftest import Run

Said = pytest.CaptureFixture[str]


def checksums(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.is_file()
    }


@pytest.fixture
def trained(train: Run, output: Path) -> Path:
    """What `ortrain train` writes, with its ONNX model."""
    assert train("--onnx") == 0
    return output


def test_a_fine_tuned_model_becomes_a_faster_and_a_smaller_one(
    trained: Path, training_file: Path, tmp_path: Path, capsys: Said
) -> None:
    before = checksums(trained)
    fast, small = tmp_path / "fast", tmp_path / "small"
    validated = ("--validate", str(training_file), "--budget")
    command = ["optimize", str(trained), "-o", str(fast), "-O2", *validated, "max_abs_diff=1e-4"]
    assert main(command) == 0
    report = EquivalenceReport.load(fast)
    assert report.max_abs_diff <= 1e-4
    assert report.task == "classification"
    assert set(report.classes) <= {"yes", "no"}
    assert any("Attention" in name for name in report.fused)
    assert report.after.nodes < report.before.nodes
    status = main(
        [
            *("quantize", str(trained), "-o", str(small), "--preset", "auto"),
            *validated,
            *("min_agreement=0.5", "--slice-column", "label"),
        ]
    )
    assert status == 0
    report = EquivalenceReport.load(small)
    assert report.after.size < report.before.size
    assert set(report.slices) == {"label=no", "label=yes"}
    assert json.loads((small / "ort_config.json").read_text())["quantization"] is not None
    capsys.readouterr()
    assert main(["validate", str(trained), str(small), "--data", str(training_file)]) == 0
    assert capsys.readouterr().out.startswith("passed\n")
    assert {"tokenizer.json", "config.json"} <= {path.name for path in small.iterdir()}
    assert checksums(trained) == before


def test_a_model_outside_its_budgets_is_refused_with_its_sensitive_nodes(
    trained: Path, training_file: Path, tmp_path: Path, capsys: Said
) -> None:
    before = checksums(trained)
    capsys.readouterr()
    command = ["quantize", str(trained), "-o", str(tmp_path / "small"), "--weight-only", "4"]
    budget = ["--validate", str(training_file), "--budget", "max_abs_diff=1e-9"]
    assert main([*command, *budget]) == 1
    said = capsys.readouterr()
    reason, nodes = said.err.splitlines()
    assert reason.startswith("ortrain: error: max_abs_diff=1e-09: output logits differs by ")
    assert "the most sensitive nodes are " in nodes
    assert not (tmp_path / "small").exists()
    assert checksums(trained) == before

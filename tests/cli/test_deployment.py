"""A fine-tuned checkpoint, optimized and quantized by the commands, with the real tools."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from ortrain.cli import main
from ortrain.deploy import EquivalenceReport
from ortrain.deploy.model_folder import load_model, save_model
from ortrain.files import replacing

COMMANDS = {"optimize": ["-O1"], "quantize": ["--preset", "avx2"]}

Said = pytest.CaptureFixture[str]


def checksums(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.is_file()
    }


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve examples of two labels."""
    path = tmp_path_factory.mktemp("data") / "examples.csv"
    kinds = {"yes": ("good", "fine", "great"), "no": ("bad", "poor", "awful")}
    rows = [
        f"the {noun} was {adjective},{label}"
        for noun in ("film", "plot")
        for label, adjectives in kinds.items()
        for adjective in adjectives
    ]
    path.write_text("\n".join(["text,label", *rows]) + "\n")
    return path


@pytest.fixture(scope="module")
def trained(tiny_model: Path, examples: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `ortrain train` writes, with its ONNX model, which is wide enough to be worth it."""
    folder = tmp_path_factory.mktemp("trained")
    model_folder, output = folder / "model", folder / "out"
    transformers.AutoTokenizer.from_pretrained(tiny_model).save_pretrained(model_folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "max_position_embeddings": 16}
    config = transformers.BertConfig(
        vocab_size=32, num_hidden_layers=2, num_attention_heads=4, **sizes
    )
    transformers.BertModel(config).save_pretrained(model_folder)
    files = ("--train", str(examples), "--eval", str(examples), "--output", str(output))
    short = ("--epochs", "10", "--batch-size", "12", "--learning-rate", "0.003", "--dropout", "0")
    model = ("--model", str(model_folder), "--engine", "torch", "--max-length", "8")
    assert main(["train", "text-classification", *model, *files, *short]) == 0
    return output


def test_a_fine_tuned_model_becomes_a_faster_and_a_smaller_one(
    trained: Path, examples: Path, tmp_path: Path, capsys: Said
) -> None:
    before = checksums(trained)
    fast, small = tmp_path / "fast", tmp_path / "small"
    validated = ("--validate", str(examples), "--budget")
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
    assert main(["validate", str(trained), str(small), "--data", str(examples)]) == 0
    assert capsys.readouterr().out.startswith("passed\n")
    assert {"tokenizer.json", "config.json"} <= {path.name for path in small.iterdir()}
    assert checksums(trained) == before


def test_a_model_outside_its_budgets_is_refused_with_the_option_that_searches_for_its_nodes(
    trained: Path, examples: Path, tmp_path: Path, capsys: Said
) -> None:
    before = checksums(trained)
    capsys.readouterr()
    command = ["quantize", str(trained), "-o", str(tmp_path / "small"), "--weight-only", "4"]
    budget = ["--validate", str(examples), "--budget", "max_abs_diff=1e-9"]
    assert main([*command, *budget]) == 1
    said = capsys.readouterr()
    reason, remedy = said.err.splitlines()
    assert reason.startswith("ortrain: error: max_abs_diff=1e-09: output logits differs by ")
    assert remedy.startswith("ortrain: error: --on-fail recover leaves the most sensitive nodes")
    assert not (tmp_path / "small").exists()
    assert checksums(trained) == before


# --- failures -----------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def with_weights_beside(folder: Path) -> None:
    """The model of a folder with its weights in a file of their own, which is not there."""
    model = load_model(folder / "model.onnx")
    save_model(model, folder / "model.onnx", external=True)
    (folder / "model.onnx_data").unlink()


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no model": (lambda folder: (folder / "model.onnx").unlink(), "has no ONNX file"),
    "cut": (lambda folder: cut(folder / "model.onnx"), "model.onnx"),
    "no weights": (with_weights_beside, "has no weight"),
    "configuration": (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
}


@pytest.mark.parametrize("command", [*COMMANDS, "validate"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_told_in_one_line(
    command: str, damage: str, trained: Path, examples: Path, tmp_path: Path, capsys: Said
) -> None:
    source, output = shutil.copytree(trained, tmp_path / "source"), tmp_path / "out"
    change, message = DAMAGES[damage]
    change(source)
    before = checksums(source)
    if command == "validate":
        given = ["validate", str(trained), str(source), "--data", str(examples)]
    else:
        given = [command, str(source), "-o", str(output), *COMMANDS[command]]
    capsys.readouterr()
    assert main(given) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith("ortrain: error: ")
    assert message in line
    assert said.out == ""
    assert not output.exists()
    assert checksums(source) == before


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_nothing_is_left_of_a_model_that_could_not_be_written(
    command: str,
    there: bool,
    error: BaseException,
    trained: Path,
    tmp_path: Path,
    capsys: Said,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, output = checksums(trained), tmp_path / "out"
    if there:
        output.mkdir()
        (output / "config.json").write_text("old")

    def fail(folder: Path) -> None:
        # Everything has been written to the folder beside, and is put on the disk.
        assert list(folder.glob("*.onnx"))
        raise error

    monkeypatch.setattr(replacing, "synchronize_tree", fail)
    capsys.readouterr()
    status = main([command, str(trained), "-o", str(output), *COMMANDS[command]])
    (line,) = capsys.readouterr().err.splitlines()
    if isinstance(error, OSError):
        assert status == 2
        assert "No space left" in line
        assert "nothing has been replaced" in line
    else:
        assert status == 130
    assert [path.name for path in output.glob("**/*")] == (["config.json"] if there else [])
    if there:
        assert (output / "config.json").read_text() == "old"
    assert checksums(trained) == before


@pytest.mark.slow
def test_static_ranges_come_from_examples_and_sensitive_nodes_stay_as_they_are(
    trained: Path, examples: Path, tmp_path: Path, capsys: Said
) -> None:
    preset = ["--preset", "avx512_vnni", "--static", "--calibrate", str(examples)]
    command = ["quantize", str(trained), *preset, "--calibration-method", "percentiles"]
    free = [*command, "-o", str(tmp_path / "free"), "--validate", str(examples)]
    assert main(free) == 0
    found = EquivalenceReport.load(tmp_path / "free")
    assert found.after.operators["QuantizeLinear"] > 0
    bound = found.max_abs_diff / 2
    budget = ["--budget", f"max_abs_diff={bound:.8f}", "--on-fail", "recover"]
    capsys.readouterr()
    assert main([*command, "-o", str(tmp_path / "strict"), *budget]) == 0
    assert capsys.readouterr().err == f"comparing on {examples}, which also calibrates\n"
    report = EquivalenceReport.load(tmp_path / "strict")
    assert report.max_abs_diff <= bound
    assert any("stayed as they were" in note for note in report.notes), report.notes
    assert 0 < report.after.operators["QuantizeLinear"] < found.after.operators["QuantizeLinear"]
    assert (tmp_path / "strict" / "sensitivity.json").is_file()


@pytest.mark.slow
def test_a_model_outside_its_budgets_is_trained_for_its_quantization(
    trained: Path, examples: Path, tmp_path: Path, capsys: Said
) -> None:
    train = tmp_path / "train.csv"
    lines = [line.replace("film", "cast").replace("plot", "plot plot") for line in rows(examples)]
    train.write_text("\n".join(["text,label", *lines]) + "\n")
    preset = ["--preset", "avx512_vnni", "--static", "--calibrate", str(examples), "--per-tensor"]
    narrow = ["--calibration-method", "percentiles", "--percentile", "70"]
    command = ["quantize", str(trained), *preset, *narrow, "--max-length", "8"]
    judged = ["--validate", str(examples), "--budget"]
    assert main([*command, *judged, "max_abs_diff=100", "-o", str(tmp_path / "before")]) == 0
    before = EquivalenceReport.load(tmp_path / "before")
    bound = f"max_abs_diff={before.max_abs_diff / 2:.6f}"
    recovery = [bound, "--on-fail", "recover", "--max-excluded", "0"]
    capsys.readouterr()
    assert main([*command, *judged, *recovery, "-o", str(tmp_path / "refused")]) == 1
    assert "there were no training data" in capsys.readouterr().out
    training = ["--train", str(train), "--train-steps", "60", "--learning-rate", "1e-3"]
    more = [*training, "--train-loss", "distillation"]
    assert main([*command, *judged, *recovery, *more, "-o", str(tmp_path / "after")]) == 0
    told = capsys.readouterr()
    assert "fine-tuned with rounded weights and activations on 12 rows" in told.out
    assert "step 60/60  loss " in told.err
    assert EquivalenceReport.load(tmp_path / "after").max_abs_diff <= before.max_abs_diff / 2
    assert json.loads((tmp_path / "after" / "fine_tuning.json").read_text())["steps"] == 60


def rows(path: Path) -> list[str]:
    return path.read_text().splitlines()[1:]

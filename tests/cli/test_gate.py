"""The commands that compare, optimize and quantize: exit status, one line each, nothing by half."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from ortrain.cli import main, optimize, quantize
from ortrain.deploy import EquivalenceError, EquivalenceReport, ModelFolder, compare
from ortrain.deploy.model_folder import published
from tests.deploy import classifiers

Said = pytest.CaptureFixture[str]


def checksums(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return classifiers.folder(tmp_path / "source")


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """Sixty examples of 5 words with labels."""
    (batch,), labels = classifiers.batches(((60, 5),))
    np.savez(tmp_path / "golden.npz", allow_pickle=False, labels=labels, **batch)
    return tmp_path / "golden.npz"


class Tool:
    """Stands in for optimizer and quantizer: adds something to a bias."""

    shift = 0.0
    nodes: tuple[Any, ...] = ()
    calls: list[dict[str, Any]] = []  # noqa: RUF012

    def __init__(self, source: ModelFolder) -> None:
        self.source = source

    @classmethod
    def from_pretrained(cls, model: Path, file_names: Any = None, file_name: Any = None) -> Tool:
        names = file_names or ([file_name] if file_name else None)
        return cls(ModelFolder.open(model, names))

    def fit(self, dataset: Any, calibration_config: Any, operators_to_quantize: Any = None) -> Any:
        return {"ranges of": len(dataset), "by": calibration_config}

    def optimize(self, configuration: Any, save_dir: Path, **given: Any) -> Path:
        Tool.calls.append({"configuration": configuration, **given})
        with published(self.source, save_dir, "rewritten model") as folder:
            after = classifiers.graph("classification", bias=[0, 0, self.shift])
            onnx.save(after, folder / f"model_{given['file_suffix']}.onnx")
            if given.get("validate") is not None:
                report = compare(
                    self.source,
                    folder,
                    given["validate"],
                    given.get("budgets"),
                    latency_runs=0,
                    memory=False,
                )
                if not report.passed:
                    error = EquivalenceError.of(report, "rewritten model")
                    if self.nodes:
                        error.sensitivity = self.nodes  # type: ignore[attr-defined]
                    raise error
                report.save(folder)
        return save_dir

    quantize = optimize


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = SimpleNamespace(**{f"O{n}": lambda n=n: f"level {n}" for n in range(1, 5)})

    def preset(name: str) -> Callable[..., Any]:
        return lambda **given: SimpleNamespace(name=name, operators_to_quantize=["MatMul"], **given)

    module = SimpleNamespace(
        ORTQuantizer=Tool,
        AutoQuantizationConfig=SimpleNamespace(**{name: preset(name) for name in quantize.PRESETS}),
        AutoCalibrationConfig=SimpleNamespace(
            **{name: lambda data, n=name, **given: (n, given) for name in quantize.METHODS}
        ),
        WeightOnlyConfig=lambda **given: SimpleNamespace(name="weight only", **given),
        HalfPrecisionConfig=lambda **given: SimpleNamespace(name="half", **given),
        FineTuning=lambda **given: SimpleNamespace(**given),
    )
    monkeypatch.setattr(optimize, "tools", lambda: (Tool, levels))
    monkeypatch.setattr(quantize, "tools", lambda: module)
    monkeypatch.setattr(Tool, "shift", 0.0)
    monkeypatch.setattr(Tool, "calls", [])


# --- validate -----------------------------------------------------------------------------------


def validate(*arguments: object) -> int:
    quick = ("--latency-runs", "0", "--no-memory")
    return main(["validate", *map(str, arguments), *quick])


def test_models_inside_the_budgets_are_status_0(
    source: Path, examples: Path, tmp_path: Path, capsys: Said
) -> None:
    after = shutil.copytree(source, tmp_path / "after")
    status = validate(
        source, after, "--data", examples, "--budget", "max_abs_diff=0", "--report", tmp_path / "r"
    )
    said = capsys.readouterr()
    assert status == 0
    assert said.err == ""
    assert said.out.startswith("passed\nexamples    60\n")
    assert said.out.endswith(f"the report is {tmp_path / 'r' / 'equivalence.html'}\n")
    assert EquivalenceReport.load(tmp_path / "r").passed


def test_models_outside_the_budgets_are_status_1_and_a_line_for_each(
    source: Path, examples: Path, tmp_path: Path, capsys: Said
) -> None:
    after = classifiers.folder(
        tmp_path / "after", classifiers.graph("classification", bias=[0, 0, -100])
    )
    status = validate(
        *(source, after, "--data", examples, "--report", tmp_path / "r"),
        *("--budget", "max_abs_diff=0.1", "--budget", "max-class-drop=0.01"),
    )
    said = capsys.readouterr()
    assert status == 1
    first, second = said.err.splitlines()
    assert first.startswith("ortrain: error: max_abs_diff=0.1: output logits differs by 100")
    assert second.startswith("ortrain: error: max_class_drop=0.01: of the class blue (")
    assert said.out.startswith("not passed\n")
    assert not EquivalenceReport.load(tmp_path / "r").passed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, e: [s / "nothing", s, "--data", e], "there is no model at"),
        (lambda s, e: [s, s, "--data", s / "nothing.csv"], "there is no file"),
        (lambda s, e: [s, s, "--data", s / "config.json"], "there is no text 'text'"),
        (lambda s, e: [s, s, "--data", e, "--task", "poetry"], "task='poetry': expected"),
        (lambda s, e: [s, s, "--data", e, "--provider", "None"], "this onnxruntime has "),
        (lambda s, e: [s, s, "--data", e, "--budget", "max_slice_drop=1"], "cannot be judged"),
        (lambda s, e: [s, s, "--data", e, "--budget", "min_agreement=2"], "expected a share"),
        (lambda s, e: [s, s, "--data", e, *["--budget", "max_abs_diff=1"] * 2], "is given twice"),
    ],
)
def test_what_cannot_be_compared_is_status_2_and_one_line(
    change: Callable[[Path, Path], list[object]],
    message: str,
    source: Path,
    examples: Path,
    capsys: Said,
) -> None:
    assert validate(*change(source, examples)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("ortrain: error: ")
    assert message in line


@pytest.mark.parametrize(
    "options",
    [
        ["--budget", "max_abs_diff"],
        ["--budget", "speed=2"],
        ["--budget", "max_abs_diff=-1"],
        ["--budget", "max_abs_diff=nan"],
        ["--batch-size", "0"],
        ["--limit", "none"],
    ],
)
def test_an_option_that_is_none_is_told_before_anything_is_read(
    options: list[str], capsys: Said
) -> None:
    with pytest.raises(SystemExit) as ended:
        validate("a", "b", "--data", "c.csv", *options)
    assert ended.value.code == 2
    assert "ortrain validate: error: argument" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_told(
    source: Path, examples: Path, tmp_path: Path, capsys: Said
) -> None:
    assert validate(source, source, "--data", examples, "--report", examples) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot save the report of equivalence" in line


# --- optimize and quantize ----------------------------------------------------------------------

COMMANDS = {"optimize": ["-O2"], "quantize": ["--preset", "avx2"]}


def run(command: str, source: Path, output: Path, *options: object) -> int:
    return main([command, str(source), "-o", str(output), *COMMANDS[command], *map(str, options)])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_model_is_published_with_its_report(
    command: str, source: Path, examples: Path, tmp_path: Path, capsys: Said
) -> None:
    before = checksums(source)
    status = run(
        command, source, tmp_path / "out", "--validate", examples, "--budget", "max_abs_diff=0"
    )
    assert status == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.startswith("passed\n")
    assert said.out.endswith(f"the model is in {tmp_path / 'out'}\n")
    assert EquivalenceReport.load(tmp_path / "out").after.path == str(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "equivalence.html",
        "equivalence.json",
        f"model_{command}d.onnx",
    }
    assert checksums(source) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_published_outside_the_budgets(
    command: str,
    source: Path,
    examples: Path,
    tmp_path: Path,
    capsys: Said,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Tool, "shift", -100.0)
    node = SimpleNamespace(node="encoder/MatMul", operator="MatMul", signal_to_noise=12.345)
    monkeypatch.setattr(Tool, "nodes", (node,))
    before = checksums(source)
    options = ("--validate", examples, "--budget", "max_metric_drop=0.01")
    assert run(command, source, tmp_path / "out", *options, "--report", tmp_path / "r") == 1
    said = capsys.readouterr()
    assert said.out.startswith("not passed\n")
    assert "the model is in" not in said.out
    line, nodes = said.err.splitlines()
    assert line.startswith("ortrain: error: max_metric_drop=0.01: accuracy goes from 1 to 0.")
    assert "the most sensitive nodes are encoder/MatMul (MatMul, 12.3 dB)" in nodes
    assert not (tmp_path / "out").exists()
    assert not EquivalenceReport.load(tmp_path / "r").passed
    assert checksums(source) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_without_examples_nothing_is_compared(
    command: str, source: Path, tmp_path: Path, capsys: Said
) -> None:
    # A report of a run before is none of this one.
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "equivalence.json").write_text("{}")
    assert run(command, source, tmp_path / "out", "--suffix", "new") == 0
    assert capsys.readouterr().out == f"the model is in {tmp_path / 'out'}\n"
    assert not (tmp_path / "out" / "equivalence.json").exists()
    assert (tmp_path / "out" / "model_new.onnx").is_file()
    assert "validate" not in Tool.calls[0]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "max_abs_diff=1"], "give examples with --validate"),
        (["--file", "none.onnx"], "has no file none.onnx"),
        (["--validate", "nothing.npz"], "there is no file nothing.npz"),
    ],
)
def test_what_is_wrong_is_status_2_and_one_line(
    command: str, options: list[str], message: str, source: Path, tmp_path: Path, capsys: Said
) -> None:
    assert run(command, source, tmp_path / "out", *options) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_source_is_no_output(command: str, source: Path, capsys: Said) -> None:
    before = checksums(source)
    assert run(command, source, source) == 2
    assert "is the folder of the source" in capsys.readouterr().err
    assert checksums(source) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupt_leaves_nothing(
    command: str, source: Path, tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    before = checksums(source)
    monkeypatch.setattr(onnx, "save", interrupt)
    assert run(command, source, tmp_path / "out") == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert not (tmp_path / "out").exists()
    assert checksums(source) == before


@pytest.mark.parametrize("level", "1234")
def test_each_level_is_one_of_the_optimizer(level: str, source: Path, tmp_path: Path) -> None:
    assert main(["optimize", str(source), "-o", str(tmp_path / "out"), f"-O{level}"]) == 0
    assert Tool.calls[0]["configuration"] == f"level {level}"


def test_sixteen_bits_have_a_configuration_of_their_own(source: Path, tmp_path: Path) -> None:
    assert main(["quantize", str(source), "-o", str(tmp_path / "out"), "--half", "bfloat16"]) == 0
    assert Tool.calls[0]["configuration"].dtype == "bfloat16"


def test_a_preset_has_what_the_options_say(source: Path, tmp_path: Path) -> None:
    assert run("quantize", source, tmp_path / "out", "--per-tensor", "--exclude", "a,b") == 0
    configuration = Tool.calls[0]["configuration"]
    assert configuration.name == "avx2"
    assert not configuration.is_static
    assert not configuration.per_channel
    assert configuration.nodes_to_exclude == ["a", "b"]


def test_ranges_of_static_quantization_come_from_the_examples(
    source: Path, examples: Path, tmp_path: Path, capsys: Said
) -> None:
    static = ("--static", "--calibrate", examples, "--calibration-method", "percentiles")
    options = (*static, "--percentile", "99", "--limit", "20", "--budget", "max_abs_diff=1")
    assert run("quantize", source, tmp_path / "out", *options) == 0
    call = Tool.calls[0]
    assert call["configuration"].is_static
    assert call["calibration_tensors_range"] == {
        "ranges of": 3,
        "by": ("percentiles", {"percentile": 99}),
    }
    assert call["validate"].examples == 20
    assert capsys.readouterr().err == f"comparing on {examples}, which also calibrates\n"


def test_what_a_recovery_trains_on_is_read_as_the_examples(
    source: Path, examples: Path, tmp_path: Path
) -> None:
    (batch,), labels = classifiers.batches(((7, 5),))
    np.savez(tmp_path / "train.npz", allow_pickle=False, labels=labels, **batch)
    recovery = ("--validate", examples, "--on-fail", "recover", "--max-excluded", "0")
    training = ("--train", tmp_path / "train.npz", "--train-steps", "9", "--learning-rate", "1e-3")
    options = (*recovery, *training, "--seed", "5", "--train-loss", "labels")
    assert run("quantize", source, tmp_path / "out", *options) == 0
    call = Tool.calls[0]
    assert call["training_data"].examples == 7
    assert call["max_excluded"] == 0
    wanted = {"steps": 9, "learning_rate": 1e-3, "seed": 5, "loss": "labels"}
    wanted |= {"ranges": "learnt", "distillation": 0.5, "stop_early": False}
    assert vars(call["fine_tuning"]) == wanted


def test_weights_alone_have_a_configuration_of_their_own(
    source: Path, examples: Path, tmp_path: Path
) -> None:
    command = ["quantize", str(source), "-o", str(tmp_path / "out"), "--weight-only", "4"]
    more = ["--block-size", "32", "--validate", str(examples), "--on-fail", "recover"]
    assert main([*command, *more]) == 0
    call = Tool.calls[0]
    assert (call["configuration"].bits, call["configuration"].block_size) == (4, 32)
    assert call["on_fail"] == "recover"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--preset: is missing"),
        (["--preset", "avx2", "--weight-only", "4"], "--weight-only: is a way of its own"),
        (["--weight-only", "4", "--half", "float16"], "--half: is a way of its own"),
        (["--half", "float16", "--static"], "--static: is of --preset"),
        (["--preset", "avx2", "--static"], "--static: needs examples"),
        (["--preset", "avx2", "--calibrate", "a.npz"], "--calibrate: ranges are taken with"),
        (["--preset", "tensorrt"], "--preset tensorrt: is static"),
        (["--preset", "avx2", "--on-fail", "recover"], "--on-fail recover: there is nothing"),
        (["--preset", "avx2", "--train", "a.npz"], "--train: is of a recovery; give --on-fail"),
        (["--preset", "avx2", "--max-excluded", "0"], "--max-excluded: is of a recovery"),
        (
            ["--weight-only", "4", "--on-fail", "recover", "--train", "a.npz"],
            "--train: weights are trained for eight bits",
        ),
        (
            ["--preset", "avx2", "--on-fail", "recover", "--validate", "a", "--train", "./a"],
            "--train: a is what the result is judged on",
        ),
    ],
)
def test_options_of_quantization_that_do_not_go_together_are_told(
    options: list[str], message: str, source: Path, tmp_path: Path, capsys: Said
) -> None:
    assert main(["quantize", str(source), "-o", str(tmp_path / "out"), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()

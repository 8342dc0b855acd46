from __future__ import annotations

import csv
import re
import signal
from pathlib import Path

import onnxruntime
import pytest
import torch
import transformers
from safetensors.torch import load_file

import ortrain
from ortrain.cli import main
from ortrain.cli.text_classification import fine_tuning, job
from ortrain.cli.text_classification.output import Output
from ortrain.cli.usage import FileError
from ortrain.deploy import export

from .conftest import Run


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model.safetensors")


def losses(output: Path) -> list[float]:
    with (output / "steps.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def assert_nothing_is_left(output: Path) -> None:
    assert not output.exists()
    assert not Output(output).unfinished.exists()


class Interrupting:
    """Presses Ctrl-C ``presses`` times in the middle of one step."""

    def __init__(self, step: int, presses: int = 1) -> None:
        self._step, self._presses, self._calls = step, presses, 0
        self._train_on = fine_tuning.train_on

    def __call__(
        self,
        runner: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: dict[str, torch.Tensor],
    ) -> float:
        self._calls += 1
        if self._calls == self._step:
            for _ in range(self._presses):
                signal.raise_signal(signal.SIGINT)
        return self._train_on(runner, optimizer, batch)


# --- what a run leaves behind -------------------------------------------------------------------


def test_a_run_writes_checkpoint_onnx_model_report_and_steps(
    tiny_model: Path, training_file: Path, evaluation_file: Path, output: Path
) -> None:
    status = main(
        [
            *("train", "text-classification", "--model", str(tiny_model)),
            *("--train", str(training_file), "--eval", str(evaluation_file)),
            *("--output", str(output), "--engine", "torch", "--batch-size", "4"),
            *("--epochs", "1", "--max-length", "8"),
        ]
    )
    assert status == 0
    assert not Output(output).unfinished.exists()
    assert not (output / "checkpoint").exists()
    assert len(losses(output)) == 3
    report = (output / "report.md").read_text()
    assert re.search(r"Accuracy \*\*\d\.\d{4}\*\* on .*eval\.csv: \d of 2 right", report)
    assert "plain PyTorch, eager" in report

    model = transformers.AutoModelForSequenceClassification.from_pretrained(output).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    assert model.config.id2label == {0: "no", 1: "yes"}
    encoded = tokenizer(["the film was good", "bad"], padding=True, return_tensors="pt")
    session = onnxruntime.InferenceSession(output / "model.onnx")
    (actual,) = session.run(None, {name: value.numpy() for name, value in encoded.items()})
    assert [value.shape for value in session.get_inputs()] == [["batch", "sequence"]] * len(encoded)
    with torch.no_grad():
        expected = model(**encoded).logits
    torch.testing.assert_close(torch.from_numpy(actual), expected)


def test_the_classifier_learns(
    train: Run, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--epochs", 20, "--dropout", 0) == 0
    assert losses(output)[-1] < 0.1 < losses(output)[0]
    assert "epoch 20: accuracy" in capsys.readouterr().out


def test_the_learning_rate_falls_in_a_line_to_zero(train: Run, output: Path) -> None:
    assert train("--learning-rate", 0.006) == 0
    with (output / "steps.csv").open() as file:
        rates = [float(row["learning_rate"]) for row in csv.DictReader(file)]
    assert rates == pytest.approx([0.006, 0.005, 0.004, 0.003, 0.002, 0.001])


def test_the_seed_alone_decides_the_weights(train: Run, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.rand(3)  # what was drawn before does not matter
        assert train("--seed", seed, "--output", tmp_path / name) == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b") != losses(tmp_path / "c")


def test_dropout_zero_switches_off_every_dropout(
    train: Run, tiny_model: Path, output: Path
) -> None:
    assert train("--dropout", 0) == 0
    model = transformers.AutoModelForSequenceClassification.from_pretrained(output)
    found = [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    assert found
    assert set(found) == {0.0}


def test_a_classifier_with_these_labels_keeps_its_order_of_classes(
    train: Run, tiny_model: Path, tmp_path: Path, output: Path
) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        tiny_model, id2label={0: "yes", 1: "no"}, label2id={"yes": 0, "no": 1}
    )
    model.save_pretrained(tmp_path / "own")
    transformers.AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "own")
    assert train("--model", tmp_path / "own") == 0
    config = transformers.AutoConfig.from_pretrained(output)
    assert config.id2label == {0: "yes", 1: "no"}


def test_the_ortrain_engine_wraps_the_model(
    train: Run, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrapper(torch.nn.Module):
        report = "the report of the engine"

        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, **batch: torch.Tensor) -> object:
            return self.module(**batch)

    # In the module's dictionary, where the lazily imported name would be put.
    monkeypatch.setitem(ortrain.__dict__, "ORTModule", Wrapper)
    assert train("--engine", "ortrain") == 0
    assert "the report of the engine" in (output / "report.md").read_text()


@pytest.mark.parametrize(
    ("choice", "skips"), [(None, None), ("auto", None), ("on", True), ("off", False)]
)
def test_padding_is_left_out_as_asked(
    train: Run, monkeypatch: pytest.MonkeyPatch, choice: str | None, skips: bool | None
) -> None:
    made = []

    class Wrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module, options: ortrain.Options | None = None) -> None:
            super().__init__()
            made.append((options or ortrain.Options()).skip_padding)
            self.module = module

        def forward(self, **batch: torch.Tensor) -> object:
            return self.module(**batch)

    monkeypatch.setitem(ortrain.__dict__, "ORTModule", Wrapper)
    asked = () if choice is None else ("--skip-padding", choice)
    assert train("--engine", "ortrain", "--epochs", 1, *asked) == 0
    assert made == [skips]


@pytest.mark.parametrize("choice", ["on", "off"])
def test_padding_of_the_plain_model_is_no_choice(
    train: Run, output: Path, capsys: pytest.CaptureFixture[str], choice: str
) -> None:
    assert train("--engine", "torch", "--skip-padding", choice) == 2
    assert f"--skip-padding {choice}: --engine torch computes all padding" in one_error(capsys)
    assert_nothing_is_left(output)


def test_both_engines_lose_alike(train: Run, output: Path, tmp_path: Path) -> None:
    assert train("--dropout", 0, "--output", tmp_path / "torch") == 0
    assert train("--dropout", 0, "--engine", "ortrain") == 0
    assert losses(output) == pytest.approx(losses(tmp_path / "torch"), abs=1e-4)


# --- interruption -------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2, 3, 5, 6])
def test_a_resumed_run_ends_with_the_same_bits(
    train: Run,
    output: Path,
    tmp_path: Path,
    step: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("--output", tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        patch.setattr(fine_tuning, "train_on", Interrupting(step))
        assert train() == 130
    assert not output.exists()
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(
        "interrupted; the last checkpoint is kept, resume with: ortrain train"
    )
    assert message.endswith("--resume")

    torch.rand(7)  # a new process has drawn other numbers
    assert train("--resume") == 0
    assert losses(output) == losses(tmp_path / "whole")
    resumed, whole = weights(output), weights(tmp_path / "whole")
    assert resumed.keys() == whole.keys()
    for name, weight in whole.items():
        assert torch.equal(resumed[name], weight), name


def test_the_second_interrupt_breaks_off_and_the_checkpoint_before_it_serves(
    train: Run,
    output: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("--output", tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        patch.setattr(fine_tuning, "train_on", Interrupting(4, presses=2))
        assert train("--checkpoint-every", 2) == 130
    assert train("--checkpoint-every", 2, "--resume") == 0
    assert "resumed after step 2" in capsys.readouterr().out
    assert losses(output) == losses(tmp_path / "whole")


def test_an_interrupt_before_the_first_checkpoint_leaves_nothing(
    train: Run,
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(fine_tuning, "train_on", Interrupting(1, presses=2))
    assert train() == 130
    assert "interrupted before the first checkpoint; nothing is kept" in capsys.readouterr().err
    assert_nothing_is_left(output)


def test_the_handler_of_ctrl_c_is_put_back(train: Run) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert train() == 0
    assert signal.getsignal(signal.SIGINT) is before


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Output(tmp_path / "out")
    output.open(resume=False)
    output.write_checkpoint({"step": 1, "identity": {}})

    def fail(state: object, file: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(FileError, match=r"no space left.*the last one is kept"):
        output.write_checkpoint({"step": 2, "identity": {}})
    assert output.read_checkpoint() == {"step": 1, "identity": {}}
    output.close()
    assert [path.name for path in tmp_path.iterdir()] == ["out.unfinished"]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--seed", 3, r"--seed 3: the run in .*out\.unfinished began with 0; resume with that"),
        ("--batch-size", 5, "--batch-size 5: the run in"),
        ("--dropout", 0, "--dropout 0.0: the run in .* began with None"),
    ],
)
def test_a_run_does_not_resume_with_other_settings(
    train: Run,
    option: str,
    value: object,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(fine_tuning, "train_on", Interrupting(1))
        assert train() == 130
    capsys.readouterr()
    assert train("--resume", option, value) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_run_resumes_that_began_before_padding_was_a_choice(
    train: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = job._identity
    with monkeypatch.context() as patch:
        patch.setattr(fine_tuning, "train_on", Interrupting(1))
        patch.setattr(
            job, "_identity", lambda s: {k: v for k, v in whole(s).items() if "padding" not in k}
        )
        assert train() == 130
    assert train("--resume") == 0


def test_a_run_does_not_resume_with_another_file(
    train: Run,
    training_file: Path,
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(fine_tuning, "train_on", Interrupting(1))
        assert train() == 130
    training_file.write_text(training_file.read_text() + "a good film,yes\n")
    capsys.readouterr()
    assert train("--resume") == 2
    assert "--train: the file is not the one that the run began with" in capsys.readouterr().err
    assert Output(output).checkpoint.exists()


# --- the ONNX file ------------------------------------------------------------------------------


def no_translation(*arguments: object, **options: object) -> None:
    raise RuntimeError("no translation for aten::strange\nand much more")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("capture", no_translation, "no translation for aten::strange"),
        ("TOLERANCE", -1.0, "the ONNX file differs from PyTorch by "),
    ],
)
def test_training_survives_an_export_that_fails(
    tiny_model: Path,
    training_file: Path,
    evaluation_file: Path,
    output: Path,
    name: str,
    value: object,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["train", "text-classification", "--model", str(tiny_model), "--engine", "torch"]
    arguments += ["--train", str(training_file), "--eval", str(evaluation_file), "--epochs", "1"]
    arguments += ["--output", str(output), "--max-length", "8"]
    monkeypatch.setattr(export, name, value)
    assert main(arguments) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"the model cannot be exported ({message}" in said
    assert "--resume --no-onnx" in said
    assert not output.exists()
    assert not list(Output(output).unfinished.rglob("*.onnx*"))
    assert main([*arguments, "--resume", "--no-onnx"]) == 0
    assert not (output / "model.onnx").exists()
    assert (output / "model.safetensors").exists()


# --- bad input ----------------------------------------------------------------------------------


def one_error(capsys: pytest.CaptureFixture[str]) -> str:
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "eval.csv: no such file; check the path"),
        ("", "eval.csv: is empty; give a file with one labelled text a row"),
        ("text,stars\na,yes\n", "eval.csv, row 1: there is no column 'label'"),
        ("text,label\na,yes\nb, c,no\n", "eval.csv, row 3: has 3 fields where there are 2 columns"),
        ("text,label\na,perhaps\n", "eval.csv, row 2: the label 'perhaps' does not occur in"),
    ],
    ids=["missing file", "empty file", "missing column", "broken row", "unknown label"],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    train: Run,
    evaluation_file: Path,
    output: Path,
    text: str | None,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if text is None:
        evaluation_file.unlink()
    else:
        evaluation_file.write_text(text)
    assert train() == 2
    assert message in one_error(capsys)
    assert_nothing_is_left(output)


def test_a_model_that_cannot_be_had_is_one_line(
    train: Run, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--model", "nobody/has-this-model") == 2
    message = one_error(capsys)
    assert "model 'nobody/has-this-model': neither a directory here nor a model" in message
    assert "give --model a directory" in message
    assert_nothing_is_left(output)


def test_a_directory_that_is_no_model_is_one_line(
    train: Run, tmp_path: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "not-a-model").mkdir()
    assert train("--model", tmp_path / "not-a-model") == 2
    message = one_error(capsys)
    assert "not-a-model: cannot be loaded as a text classifier (" in message
    assert "needs config.json, the weights and the tokenizer" in message
    assert_nothing_is_left(output)


def test_weights_that_are_cut_short_are_one_line(
    train: Run, tiny_model: Path, tmp_path: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in tiny_model.iterdir():
        content = file.read_bytes()
        half = len(content) // 2 if file.suffix == ".safetensors" else len(content)
        (copy / file.name).write_bytes(content[:half])
    assert train("--model", copy) == 2
    assert "copy: cannot be loaded as a text classifier (" in one_error(capsys)
    assert_nothing_is_left(output)


def test_a_text_longer_than_the_model_reads_is_one_line(
    train: Run, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--max-length", 17) == 2
    assert "--max-length 17: the model reads at most 16 tokens; give 16" in one_error(capsys)
    assert_nothing_is_left(output)


def test_a_loss_that_is_not_finite_ends_the_run(
    train: Run, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--learning-rate", 1e38) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"the loss of step \d is (nan|inf); lower --learning-rate 1e\+38", message)
    assert_nothing_is_left(output)


def test_an_output_that_exists_is_left_alone(
    train: Run, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output.mkdir()
    (output / "precious").touch()
    assert train() == 2
    assert "exists already; remove it, or choose another --output" in one_error(capsys)
    assert [path.name for path in output.iterdir()] == ["precious"]


def test_an_empty_output_directory_is_filled(train: Run, output: Path) -> None:
    output.mkdir()
    assert train() == 0
    assert (output / "report.md").exists()


def test_an_output_below_a_file_is_one_line(
    train: Run, training_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--output", training_file / "out") == 2
    assert "cannot be made" in one_error(capsys)


def test_nothing_to_resume_is_one_line(
    train: Run, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--resume") == 2
    assert "holds no checkpoint to resume; run again without --resume" in one_error(capsys)
    assert_nothing_is_left(output)


def test_a_checkpoint_is_not_overwritten_unasked(
    train: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(fine_tuning, "train_on", Interrupting(1))
        assert train() == 130
    capsys.readouterr()
    assert train() == 2
    assert "holds the checkpoint of an interrupted run; add --resume" in one_error(capsys)


def test_a_damaged_checkpoint_is_one_line(
    train: Run, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = Output(output).checkpoint
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes(b"damaged")
    assert train("--resume") == 2
    assert "state.pt: cannot be read (" in one_error(capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (
            ["train", "text-classification"],
            "the following arguments are required: --model, --train",
        ),
        (["train", "text-classification", "--epochs", "x"], "'x' is not a whole number from 1 up"),
        (["train", "text-classification", "--dropout", "1"], "'1' is not a probability below 1"),
        (["train", "text-classification", "--columns", "a,,b"], "'a,,b' is not a list of names"),
        (["train", "text-classification", "--engine", "jax"], "invalid choice: 'jax'"),
        (["train", "text-classification", "--skip-padding", "no"], "invalid choice: 'no'"),
    ],
)
def test_a_wrong_option_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert message in one_error(capsys)

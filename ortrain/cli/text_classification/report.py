"""The short report of a run, and its steps as a table for a spreadsheet."""

from __future__ import annotations

import os
import platform
import statistics
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from ortrain.cli.progress import duration
from ortrain.cli.text_classification.fine_tuning import History
from ortrain.cli.text_classification.settings import Settings

_PACKAGES = ("ortrain", "torch", "transformers", "onnxruntime", "onnx", "onnx-ir", "onnxscript")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run has come to.

    Attributes:
        settings: What was asked for.
        labels: The names of the classes.
        training_examples: Examples in the training file.
        evaluation_examples: Examples in the evaluation file.
        history: The steps and evaluations.
        engine: What ran where, as the engine tells it.
        export_seconds: Time to write and check the ONNX file; None if there is none.
        export_difference: Largest relative difference of its logits from PyTorch's.
    """

    settings: Settings
    labels: tuple[str, ...]
    training_examples: int
    evaluation_examples: int
    history: History
    engine: str
    export_seconds: float | None = None
    export_difference: float | None = None

    @property
    def accuracy(self) -> float:
        """The share of correct answers on the evaluation file, after the last epoch."""
        return self.history.correct[-1] / self.evaluation_examples

    @property
    def training_seconds(self) -> float:
        """The time of all steps; reading, evaluation, checkpoints and export are not in it."""
        return sum(self.history.seconds)

    @property
    def samples_per_second(self) -> float:
        """Training examples a second, the first step included."""
        return self.training_examples * self.settings.epochs / self.training_seconds


def write_report(outcome: Outcome, path: Path) -> None:
    """Write the report as Markdown."""
    settings, history = outcome.settings, outcome.history
    lines = [
        f"# Text classification: {settings.model}",
        "",
        (
            f"Accuracy **{outcome.accuracy:.4f}** on {settings.evaluation_file}: "
            f"{history.correct[-1]} of {outcome.evaluation_examples} right."
        ),
        "",
        "| training | |",
        "| --- | --- |",
        f"| engine asked for | {settings.engine} |",
        (
            f"| time of all steps | {outcome.training_seconds:.1f} s "
            f"({duration(outcome.training_seconds)}) |"
        ),
        f"| first step | {history.seconds[0]:.2f} s |",
        f"| median step | {statistics.median(history.seconds):.3f} s |",
        f"| samples a second | {outcome.samples_per_second:.1f} |",
        f"| steps | {history.steps} |",
        (
            f"| loss of the first and the last step | {history.losses[0]:.4f}, "
            f"{history.losses[-1]:.4f} |"
        ),
    ]
    lines += [
        f"| accuracy after epoch {epoch} | {correct / outcome.evaluation_examples:.4f} |"
        for epoch, correct in enumerate(history.correct, start=1)
    ]
    lines += ["", "## What ran where", "", "```", outcome.engine, "```", "", "## Files", ""]
    lines += [
        (
            "- this directory loads with "
            "`transformers.AutoModelForSequenceClassification.from_pretrained`"
        ),
        "- `steps.csv`: loss, learning rate and seconds of each step",
    ]
    if outcome.export_seconds is not None:
        lines.append(
            f"- `model.onnx`: written and checked in {outcome.export_seconds:.1f} s, not counted "
            f"above; its logits differ from PyTorch's by {outcome.export_difference:.1e} relative"
        )
    dropout = "the model's own" if settings.dropout is None else f"{settings.dropout:g}"
    lines += [
        "",
        "## Settings",
        "",
        "| | |",
        "| --- | --- |",
        f"| training file | {settings.training_file}, {outcome.training_examples} examples |",
        f"| evaluation file | {settings.evaluation_file}, {outcome.evaluation_examples} examples |",
        f"| labels | {', '.join(outcome.labels)} |",
        f"| epochs | {settings.epochs} |",
        f"| batch size | {settings.batch_size} |",
        f"| longest example | {settings.max_length} tokens |",
        f"| learning rate | {settings.learning_rate:g}, in a line to 0 |",
        f"| weight decay | {settings.weight_decay:g} |",
        f"| padding left out | {settings.skip_padding} |",
        f"| dropout | {dropout} |",
        f"| seed | {settings.seed} |",
        "",
        "## Machine",
        "",
        (
            f"{platform.machine()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads, "
            f"Python {platform.python_version()}, {_versions()}"
        ),
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="backslashreplace")


def write_steps(history: History, path: Path) -> None:
    """Write one row a step."""
    rows = zip(history.losses, history.rates, history.seconds, strict=True)
    lines = ["step,loss,learning_rate,seconds"]
    lines += [
        f"{step},{loss!r},{rate:.6g},{seconds:.4f}"
        for step, (loss, rate, seconds) in enumerate(rows, start=1)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="backslashreplace")


def _versions() -> str:
    found = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)

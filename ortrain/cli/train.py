"""``ortrain train TASK``: fine-tune a model on files."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ortrain.cli import signals
from ortrain.cli.arguments import (
    column_names,
    count,
    model,
    new_directory,
    not_negative,
    path,
    positive,
    probability,
    seed,
)
from ortrain.cli.output import libraries_to_stderr
from ortrain.cli.text_classification.settings import Settings
from ortrain.cli.usage import UsageError
from ortrain.extras import require

if TYPE_CHECKING:
    from ortrain.cli.text_classification.report import Outcome

_DEFAULTS = Settings(
    model="", training_file=Path(), evaluation_file=Path(), output=Path("ortrain-output")
)


def add_to(commands: Any) -> None:
    """Add the command and its tasks to the parser's commands."""
    parser = commands.add_parser("train", help="fine-tune a model on files")
    tasks = parser.add_subparsers(title="tasks", metavar="TASK", required=True)
    task = tasks.add_parser(
        "text-classification",
        help="a Hugging Face classifier on labelled text",
        description="Fine-tune a Hugging Face classifier on CSV, TSV or JSON-lines files and write "
        "the PyTorch checkpoint, the ONNX model and a report.",
    )
    _add_arguments(task)
    task.set_defaults(run=run_text_classification)


def run_text_classification(options: argparse.Namespace) -> int:
    """Run the task as its options say; returns the exit status."""
    require("hf", "ortrain train")
    settings = Settings(
        model=options.model,
        training_file=options.train,
        evaluation_file=options.eval,
        output=options.output,
        engine=options.engine,
        skip_padding=options.skip_padding,
        epochs=options.epochs,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        weight_decay=options.weight_decay,
        max_length=options.max_length,
        seed=options.seed,
        dropout=options.dropout,
        text_column=options.text_column,
        label_column=options.label_column,
        columns=options.columns,
        checkpoint_every=options.checkpoint_every,
        resume=options.resume,
        onnx=options.onnx,
        trust_remote_code=options.trust_remote_code,
    )
    try:
        with libraries_to_stderr() as out:
            try:
                # Here and not above: torch and transformers take seconds to load, which --help and
                # a typing error need not wait for.
                from ortrain.cli.text_classification import job
            except ModuleNotFoundError as error:
                raise UsageError(
                    f"the package '{error.name}' is not installed; pip install 'ortrain[hf]'"
                ) from error
            outcome = job.run(settings, out=out)
    except KeyboardInterrupt as interrupt:
        message = _how_to_resume(settings, options.command_line)
        raise signals.Ended(signals.number_of(interrupt), message) from None
    if outcome is not None:
        print_outcome(outcome)
    return 0


def print_outcome(outcome: Outcome, out: TextIO | None = None) -> None:
    """Print what a finished run has come to, by default on stdout."""
    settings = outcome.settings
    seconds, rate = outcome.training_seconds, outcome.samples_per_second
    written = "the model, its ONNX file" if settings.onnx else "the model"
    print(f"trained in {seconds:.1f} s, {rate:.1f} samples/s", file=out)
    print(f"accuracy {outcome.accuracy:.4f} on {settings.evaluation_file}", file=out)
    print(f"{written} and report.md are in {settings.output}", file=out)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, type=model, metavar="NAME_OR_DIR", help="a pretrained model")
    add(
        "--trust-remote-code",
        action="store_true",
        help="run the Python files that come with the model; without it none of them is run",
    )
    add("--train", required=True, type=path, metavar="FILE", help="examples to train on")
    add("--eval", required=True, type=path, metavar="FILE", help="examples to evaluate on")
    add(
        "--output",
        type=new_directory,
        metavar="DIR",
        default=_DEFAULTS.output,
        help="the directory to make (%(default)s)",
    )
    add(
        "--engine",
        choices=("ortrain", "torch"),
        default=_DEFAULTS.engine,
        help="ortrain trains through ONNX, torch runs the plain model (%(default)s)",
    )
    add(
        "--skip-padding",
        choices=("auto", "on", "off"),
        default=_DEFAULTS.skip_padding,
        help="whether ortrain leaves out work on padding that nobody reads; off computes all of it "
        "(%(default)s)",
    )
    add("--epochs", type=count, default=_DEFAULTS.epochs, metavar="N", help="(%(default)s)")
    add("--batch-size", type=count, default=_DEFAULTS.batch_size, metavar="N", help="(%(default)s)")
    add(
        "--learning-rate",
        type=positive,
        default=_DEFAULTS.learning_rate,
        metavar="X",
        help="of the first step; falls in a line to zero (%(default)s)",
    )
    add(
        "--weight-decay",
        type=not_negative,
        default=_DEFAULTS.weight_decay,
        metavar="X",
        help="(%(default)s)",
    )
    add(
        "--max-length",
        type=count,
        default=_DEFAULTS.max_length,
        metavar="N",
        help="tokens of a text that are read (%(default)s)",
    )
    add("--seed", type=seed, default=_DEFAULTS.seed, metavar="N", help="(%(default)s)")
    add(
        "--dropout",
        type=probability,
        metavar="P",
        help="replaces every dropout probability of the model",
    )
    add("--text-column", default=_DEFAULTS.text_column, metavar="NAME", help="(%(default)s)")
    add("--label-column", default=_DEFAULTS.label_column, metavar="NAME", help="(%(default)s)")
    add(
        "--columns",
        type=column_names,
        metavar="NAME,NAME",
        help="the names of all columns, for files without a header line",
    )
    add(
        "--checkpoint-every",
        type=count,
        default=_DEFAULTS.checkpoint_every,
        metavar="N",
        help="steps between two checkpoints (%(default)s)",
    )
    add("--resume", action="store_true", help="continue an interrupted run")
    add("--no-onnx", dest="onnx", action="store_false", help="do not write the ONNX file")


def _how_to_resume(settings: Settings, command_line: list[str]) -> str:
    from ortrain.cli.text_classification.output import Output

    output = Output(settings.output)
    if output.is_complete() and not output.unfinished.exists():
        return f"interrupted after the end; the result is in {output.directory}"
    if not output.checkpoint.exists():
        return "interrupted before the first checkpoint; nothing is kept"
    again = command_line if settings.resume else [*command_line, "--resume"]
    return f"interrupted; the last checkpoint is kept, resume with: {shlex.join(again)}"

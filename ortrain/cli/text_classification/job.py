"""The job from end to end: files in, a directory with the trained classifier out."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors import SafetensorError

from ortrain.cli.progress import Progress
from ortrain.cli.text_classification.batches import Batches
from ortrain.cli.text_classification.classifier import (
    Classifier,
    check_length,
    engine_report,
    load_classifier,
    wrapped,
)
from ortrain.cli.text_classification.examples import Example, check_labels, label_names
from ortrain.cli.text_classification.examples import read_examples as read_file
from ortrain.cli.text_classification.fine_tuning import Training
from ortrain.cli.text_classification.output import Output
from ortrain.cli.text_classification.report import Outcome, write_report, write_steps
from ortrain.cli.text_classification.settings import Settings
from ortrain.cli.usage import CommandError, FileError, UsageError, one_line
from ortrain.files.checksums import sha256

_WEIGHTS = {".bin", ".h5", ".msgpack", ".onnx", ".pt", ".safetensors"}
_ONE_FILE = 1_500_000_000
"""Bytes of weights up to which ``model.onnx`` holds them: a protobuf has at most 2 GiB."""


class ExportError(CommandError):
    """Training is done and kept, but the ONNX file could not be made of it."""


def run(
    settings: Settings, *, out: TextIO | None = None, err: TextIO | None = None
) -> Outcome | None:
    """Fine-tune a classifier and write its directory.

    Args:
        settings: What to do.
        out: Takes what is found out; stdout by default.
        err: Takes the progress; stderr by default.

    Returns:
        What it has come to; its settings have the directory that was made. None where the run that
        was to be resumed had only to be put in its place.

    Raises:
        UsageError: An input is wrong. No directory is left behind unless it holds a checkpoint.
        FileError: A file cannot be written; the last checkpoint is kept.
        ExportError: The trained model cannot be written as ONNX.
        KeyboardInterrupt: A signal has asked to end.
    """
    out, err = out or sys.stdout, err or sys.stderr
    if settings.engine == "torch" and settings.skip_padding != "auto":
        raise UsageError(
            f"--skip-padding {settings.skip_padding}: --engine torch computes all padding; leave "
            "one of the two out"
        )
    output = Output(settings.output)
    output.check(resume=settings.resume)
    if settings.resume and output.is_complete():
        _put_in_place(output, out)
        return None
    training_examples, evaluation_examples, labels = _read(settings)
    classifier = load_classifier(
        settings.model,
        labels,
        seed=settings.seed,
        dropout=settings.dropout,
        trust_remote_code=settings.trust_remote_code,
    )
    check_length(classifier, settings.max_length)
    evaluation = Batches(
        classifier,
        evaluation_examples,
        size=settings.batch_size,
        max_length=settings.max_length,
    )
    training_batches = Batches(
        classifier,
        training_examples,
        size=settings.batch_size,
        max_length=settings.max_length,
        seed=settings.seed,
    )
    identity = _identity(settings)
    output.open(resume=settings.resume)
    try:
        state = output.read_checkpoint() if settings.resume else None
        if state is not None:
            _check_identity(state["identity"], identity, output)
        runner = wrapped(classifier.model, settings.engine, settings.skip_padding)
        training = Training(classifier.model, runner, training_batches, evaluation, settings)
        if state is None:
            torch.manual_seed(settings.seed)
        else:
            _restore(training, state, output)
            print(f"resumed after step {training.history.steps}", file=out)
        print(classifier.weights_summary, file=out)
        print(
            f"{len(training_examples)} examples, {len(labels)} labels, {training.total_steps} "
            f"steps, engine {settings.engine}",
            file=out,
            flush=True,
        )
        progress = Progress(err, training.total_steps, done=training.history.steps)
        try:
            training.run(
                progress,
                lambda state: output.write_checkpoint({**state, "identity": identity}),
                lambda epoch, correct: print(
                    f"epoch {epoch}: accuracy {correct / len(evaluation_examples):.4f} "
                    f"({correct} of {len(evaluation_examples)})",
                    file=out,
                    flush=True,
                ),
            )
        finally:
            progress.close()
        with _writing(output):
            output.clear()
            classifier.save(output.unfinished)
        export_seconds = export_difference = None
        if settings.onnx:
            print("writing and checking model.onnx", file=out, flush=True)
            started = time.perf_counter()
            export_difference = _export(classifier, evaluation, output)
            export_seconds = time.perf_counter() - started
        outcome = Outcome(
            settings=settings,
            labels=classifier.labels,
            training_examples=len(training_examples),
            evaluation_examples=len(evaluation_examples),
            history=training.history,
            engine=engine_report(runner),
            export_seconds=export_seconds,
            export_difference=export_difference,
        )
        with _writing(output):
            write_report(outcome, output.unfinished / "report.md")
            write_steps(training.history, output.unfinished / "steps.csv")
        place = output.finish()
    finally:
        output.close()
    if place != output.directory:
        print(f"{output.directory}: is taken meanwhile; the result is in {place}", file=err)
    return replace(outcome, settings=replace(settings, output=place))


def _put_in_place(output: Output, out: TextIO) -> None:
    """Finish a run that was killed after all was written."""
    output.open(resume=True)
    try:
        place = output.finish()
    finally:
        output.close()
    print(f"{place}: is complete", file=out)


@contextmanager
def _writing(output: Output) -> Iterator[None]:
    """Where the trained model is written: whatever fails, its checkpoint is kept.

    Raises:
        FileError: a file cannot be written.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise FileError(
            f"{output.unfinished}: the trained model cannot be written ({one_line(error)}); its "
            "checkpoint is kept, make room and run the same command with --resume"
        ) from error


def _restore(training: Training, state: dict[str, Any], output: Output) -> None:
    try:
        training.restore(state)
    except Exception as error:
        # Whole, and of these settings: of another version, or of a model that has changed.
        raise UsageError(
            f"{output.checkpoint}: does not fit the model ({one_line(error)}); remove "
            f"{output.unfinished} and run again without --resume"
        ) from error


def _read(settings: Settings) -> tuple[list[Example], list[Example], list[str]]:
    training, evaluation = (
        read_file(
            path,
            text_column=settings.text_column,
            label_column=settings.label_column,
            columns=settings.columns,
        )
        for path in (settings.training_file, settings.evaluation_file)
    )
    labels = label_names(training, settings.training_file)
    check_labels(evaluation, settings.evaluation_file, labels, settings.training_file)
    return training, evaluation, labels


def _identity(settings: Settings) -> dict[str, str]:
    """All that the weights depend on; a run resumes only where all of it is as it was."""
    files = {"--train": settings.training_file, "--eval": settings.evaluation_file}
    folder = Path(settings.model)
    if folder.is_dir():
        # The weights are in the checkpoint; the rest is read again.
        others = (path for path in folder.iterdir() if path.suffix not in _WEIGHTS)
        files |= {f"--model's {path.name}": path for path in others if path.is_file()}
    try:
        digests = {option: sha256(path) for option, path in files.items()}
    except OSError as error:
        raise UsageError(
            f"{error.filename}: cannot be read any more ({error.strerror}); let it be as long as "
            "the command runs"
        ) from None
    names = {
        "--model": settings.model,
        "--engine": settings.engine,
        "--skip-padding": settings.skip_padding,
        "--epochs": settings.epochs,
        "--batch-size": settings.batch_size,
        "--learning-rate": settings.learning_rate,
        "--weight-decay": settings.weight_decay,
        "--max-length": settings.max_length,
        "--seed": settings.seed,
        "--dropout": settings.dropout,
        "--text-column": settings.text_column,
        "--label-column": settings.label_column,
        "--columns": settings.columns,
    }
    return {**digests, **{option: str(value) for option, value in names.items()}}


def _check_identity(saved: dict[str, str], now: dict[str, str], output: Output) -> None:
    for option, value in now.items():
        is_part = option.startswith("--model's")
        is_new = is_part or option == "--skip-padding"
        if saved.get(option) == value or (is_new and option not in saved):
            continue  # earlier versions did not note the model's files, nor have that option
        if is_part or option in ("--train", "--eval"):
            raise UsageError(
                f"{option}: the file is not the one that the run began with; restore it, or remove "
                f"{output.unfinished} and start again without --resume"
            )
        raise UsageError(
            f"{option} {value}: the run in {output.unfinished} began with {saved.get(option)}; "
            "resume with that, or remove the directory and start again without --resume"
        )


def _export(classifier: Classifier, evaluation: Batches, output: Output) -> float:
    from ortrain.deploy import export_onnx

    batch = next(evaluation.epoch())
    first = {name: tensor for name, tensor in batch.items() if name != "labels"}
    # A second, smaller size, so that a size that the capture froze shows.
    smallest = {name: tensor[:1, :2] for name, tensor in first.items()}
    try:
        return export_onnx(
            classifier.model,
            [first, smallest],
            output.unfinished / "model.onnx",
            outputs=["logits"],
            dimensions=("batch", "sequence"),
            external_data_above=_ONE_FILE,
        )
    except OSError as error:
        raise FileError(
            f"{output.unfinished / 'model.onnx'}: cannot be written ({one_line(error)}); the "
            "trained weights are kept, make room and run the same command with --resume"
        ) from error
    except Exception as error:
        # The export fails with errors of every kind, and hours of training hang on this line.
        raise ExportError(
            f"the model cannot be exported ({one_line(error)}); the trained weights are kept in "
            f"{output.unfinished}, run the same command with --resume --no-onnx to finish without "
            "the ONNX file"
        ) from error

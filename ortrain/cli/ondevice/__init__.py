"""``ortrain ondevice run DIR``: train artifacts on the arrays of a file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ortrain.cli import signals
from ortrain.cli.arguments import count, name_part, names, positive, seed, whole
from ortrain.cli.usage import CommandError, UsageError, one_line, told
from ortrain.files.lock import Lock
from ortrain.files.replacing import regular


def add_to(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser("ondevice", help="train on-device artifacts")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    action = actions.add_parser(
        "run",
        help="train artifacts on the arrays of an .npz file",
        description="Train artifacts with onnxruntime alone. The arrays of FILE.npz have the names "
        "of the training model's inputs, and a row for each sample.",
    )
    _add_arguments(action)
    action.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Train as the options say; returns the exit status."""
    from ortrain.cli.ondevice.loop import Loop, Settings
    from ortrain.errors import ExecutionError, OrtrainError

    settings = Settings(
        folder=options.folder,
        prefix=options.prefix,
        data=options.data,
        evaluation_data=options.eval,
        checkpoint=options.checkpoint or options.folder / f"{options.prefix}trained_checkpoint",
        epochs=options.epochs,
        batch_size=options.batch_size,
        accumulate=options.accumulate,
        learning_rate=options.learning_rate,
        warmup_steps=options.warmup_steps,
        decay=options.decay,
        seed=options.seed,
        checkpoint_every=options.checkpoint_every,
        resume=options.resume,
    )
    try:
        with _locked(settings.checkpoint):
            loop = Loop(settings)
            loop.run(sys.stdout)
            if options.inference is not None:
                loop.export(options.inference, options.outputs or ())
    except OrtrainError as error:
        kind = CommandError if isinstance(error, ExecutionError) else UsageError
        raise kind(told(error)) from error
    except (OSError, OverflowError, TypeError, ValueError) as error:
        raise UsageError(one_line(error)) from error
    except KeyboardInterrupt as interrupt:
        kept = settings.checkpoint.exists()
        message = (
            f"interrupted; the last checkpoint is {settings.checkpoint}, go on with --resume"
            if kept
            else "interrupted before the first checkpoint; nothing is kept"
        )
        raise signals.Ended(signals.number_of(interrupt), message) from None
    print(f"the checkpoint is {settings.checkpoint}")
    return 0


@contextmanager
def _locked(checkpoint: Path) -> Iterator[None]:
    """Keeps other processes from writing the same checkpoint.

    Raises:
        UsageError: one does, or there can be no such file.
    """
    try:
        target = regular(checkpoint)
        lock = Lock(target.with_name(f".{target.name}.lock"))
        taken = lock.take()
    except (OSError, ValueError) as error:
        raise UsageError(f"--checkpoint {checkpoint}: {error}; name another file") from None
    if not taken:
        raise UsageError(
            f"--checkpoint {checkpoint}: {lock.holder()} is writing it; wait for its end, or name "
            "another file"
        )
    try:
        yield
    finally:
        lock.release()


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="where the artifacts are")
    add("--data", type=Path, required=True, metavar="FILE.npz", help="arrays to train on")
    add("--eval", type=Path, metavar="FILE.npz", help="arrays to evaluate on after each epoch")
    add("--prefix", type=name_part, default="", metavar="TEXT", help="before each artifact's name")
    add("--epochs", type=count, default=1, metavar="N", help="(%(default)s)")
    add("--batch-size", type=count, default=32, metavar="N", help="(%(default)s)")
    add(
        "--accumulate",
        type=count,
        default=1,
        metavar="N",
        help="batches whose gradients make one update (%(default)s)",
    )
    add("--learning-rate", type=positive, default=1e-3, metavar="X", help="(%(default)s)")
    add("--warmup-steps", type=whole, default=0, metavar="N", help="updates (%(default)s)")
    add("--decay", action="store_true", help="let the learning rate fall in a line to zero")
    add("--seed", type=seed, default=0, metavar="N", help="of order and dropout (%(default)s)")
    add("--checkpoint", type=Path, metavar="FILE", help="to write (DIR/trained_checkpoint)")
    add(
        "--checkpoint-every",
        type=count,
        metavar="N",
        help="updates between two checkpoints (an epoch's)",
    )
    add("--resume", action="store_true", help="go on from the checkpoint to write")
    add("--inference", type=Path, metavar="FILE.onnx", help="write an inference model at the end")
    add(
        "--outputs",
        type=names,
        metavar="NAME,…",
        help="of the inference model (all results but the loss)",
    )

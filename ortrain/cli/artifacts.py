"""``ortrain artifacts MODEL.onnx``: make what a device trains."""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ortrain.cli.arguments import count, name_part, names, not_negative, positive
from ortrain.cli.output import libraries_to_stderr
from ortrain.cli.usage import UsageError, one_line, told

LOSSES = ("CrossEntropyLoss", "MSELoss", "BCEWithLogitsLoss", "L1Loss")
OPTIMIZERS = ("AdamW", "Adam", "SGD", "Lion")


def add_to(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "artifacts",
        help="make on-device training artifacts of an ONNX model",
        description="Write training model, evaluation model, optimizer and checkpoint of an ONNX "
        "model, for any device that has onnxruntime. Export the model in training mode where it "
        "holds dropout or batch normalization.",
    )
    _add_arguments(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Make the artifacts; returns the exit status."""
    with libraries_to_stderr():
        _make(options)
    print(f"the artifacts are in {options.output}")
    return 0


def _make(options: argparse.Namespace) -> None:
    from ortrain.errors import OrtrainError
    from ortrain.ondevice import optim
    from ortrain.ondevice.artifacts import LossType, generate_artifacts
    from ortrain.ondevice.making.lora import LoRA
    from ortrain.ondevice.making.onnx_source import read, weights

    try:
        with warnings_held_back():
            model = read(options.model)
            found = weights(model)
            frozen = _matching(found, options.freeze, "--freeze")
            trained = _matching(found, options.train, "--train") if options.train else found
            trained = [name for name in trained if name not in frozen]
            settings = {"weight_decay": options.weight_decay, "max_norm": options.max_norm}
            given = {name: value for name, value in settings.items() if value is not None}
            rank = options.lora_rank
            generate_artifacts(
                model,
                requires_grad=trained if rank is None or options.train else None,
                frozen_params=frozen if rank is None else None,
                loss=LossType[options.loss] if options.loss else None,
                optimizer=getattr(optim, options.optimizer)(**given),
                artifact_directory=options.output,
                prefix=options.prefix,
                ort_format=options.ort_format,
                additional_output_names=options.outputs,
                nominal_checkpoint=options.nominal_checkpoint,
                loss_input_names=options.loss_inputs,
                lora=None if rank is None else LoRA(rank, options.lora_targets),
            )
    except OrtrainError as error:
        raise UsageError(told(error)) from error
    except (OSError, ValueError) as error:
        raise UsageError(one_line(error)) from error


@contextmanager
def warnings_held_back() -> Iterator[None]:
    """What libraries warn of is shown where the command succeeds, else its own line alone."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)  # onnx_ir logs a traceback where it infers no shapes
    try:
        with warnings.catch_warnings(record=True) as caught:
            yield
    finally:
        logging.disable(disabled)
    for each in caught:
        warnings.showwarning(each.message, each.category, each.filename, each.lineno)


def _matching(found: list[str], patterns: tuple[str, ...], option: str) -> list[str]:
    """The names that match; each pattern has to match one."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in found):
            raise UsageError(
                f"{option} {pattern}: no weight of the model has such a name; "
                f"it has {', '.join(found[:5])}{', …' if len(found) > 5 else ''}"
            )
    return [name for name in found if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL.onnx", help="the model")
    add("-o", "--output", type=Path, required=True, metavar="DIR", help="where to write")
    add("--loss", choices=LOSSES, help="without it the model's first output is the loss")
    add("--optimizer", choices=OPTIMIZERS, default="AdamW", help="(%(default)s)")
    add("--weight-decay", type=not_negative, metavar="X", help="of the optimizer")
    add("--max-norm", type=positive, metavar="X", help="clip the gradients by their global norm")
    add(
        "--train",
        type=names,
        default=(),
        metavar="PATTERN,…",
        help="weights to train, by patterns of their names (all)",
    )
    add(
        "--freeze",
        type=names,
        default=(),
        metavar="PATTERN,…",
        help="weights to keep as they are (none)",
    )
    add("--lora-rank", type=count, metavar="N", help="train adapters of this rank instead")
    add(
        "--lora-targets",
        type=names,
        default=("*",),
        metavar="PATTERN,…",
        help="weights that get adapters (all of products)",
    )
    add("--outputs", type=names, metavar="NAME,…", help="further results of each step")
    add("--loss-inputs", type=names, metavar="NAME,…", help="outputs that go to the loss (all)")
    add("--prefix", type=name_part, default="", metavar="TEXT", help="before each file's name")
    add("--ort-format", action="store_true", help="also write .ort files")
    add("--nominal-checkpoint", action="store_true", help="also write a checkpoint without tensors")

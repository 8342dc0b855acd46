"""The ``ortrain`` command. Each command is a module with ``add_to`` and a function to run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ortrain.cli import artifacts, demo, ondevice, train
from ortrain.cli.output import descriptor_to_stderr
from ortrain.cli.usage import CommandError, Parser, one_line, told
from ortrain.errors import MissingPackage

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: The arguments after the program's name; those of the process by default.

    Returns:
        0 on success, 1 if a step failed, 2 if the command line or an input is wrong, 130 after
        Ctrl-C.
    """
    with descriptor_to_stderr():
        return _run(list(sys.argv[1:] if argv is None else argv))


def _run(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    options.command_line = ["ortrain", *arguments]
    try:
        status: int = options.run(options)
    except CommandError as error:
        print(f"ortrain: error: {one_line(error)}", file=sys.stderr)
        return error.status
    except MissingPackage as error:
        print(f"ortrain: error: {told(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        # A command that has something to say about where it stopped says it in the exception.
        print(str(interrupt) or "interrupted", file=sys.stderr)
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ortrain",
        description="Train PyTorch models through an ordinary ONNX graph.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    train.add_to(commands)
    demo.add_to(commands)
    artifacts.add_to(commands)
    ondevice.add_to(commands)
    return parser

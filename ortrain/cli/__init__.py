"""The ``ortrain`` command. Each command is a module with ``add_to`` and a function to run."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence

from ortrain.cli import (
    artifacts,
    check,
    demo,
    ondevice,
    optimize,
    quantize,
    run,
    signals,
    train,
    validate,
)
from ortrain.cli.output import descriptor_to_stderr
from ortrain.cli.usage import CommandError, Parser, one_line, told
from ortrain.cli.version import Version
from ortrain.errors import MissingPackage

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: The arguments after the program's name; those of the process by default.

    Returns:
        0 on success, 1 if a step failed, 2 if the command line or an input is wrong or a file
        cannot be written, 128 and the signal's number after one that asks to end (130: Ctrl-C).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["run"] and arguments[1:2] not in (["-h"], ["--help"]):
        # A script has its own signals, its own output and its own errors.
        return run.run_script(arguments[1:])
    with descriptor_to_stderr():
        return _run(arguments)


def _run(arguments: list[str]) -> int:
    try:
        with signals.raised():
            options = _parser().parse_args(arguments)
            options.command_line = ["ortrain", *arguments]
            for stream in (sys.stdout, sys.stderr):
                # A path or a label may have what the terminal's encoding has not.
                if isinstance(stream, io.TextIOWrapper):
                    stream.reconfigure(errors="backslashreplace")
            status: int = options.run(options)
            sys.stdout.flush()
    except CommandError as error:
        print(f"ortrain: error: {one_line(error)}", file=sys.stderr)
        return error.status
    except MissingPackage as error:
        print(f"ortrain: error: {told(error)}", file=sys.stderr)
        return 1
    except OSError as error:
        # Standard output on a full disk or at a closed pipe, if nothing better has been said.
        _give_up_output()
        place = error.filename or "standard output"
        print(f"ortrain: error: {place}: {error.strerror or one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        # A command that has something to say about where it stopped says it in the exception.
        print(str(interrupt) or "interrupted", file=sys.stderr)
        return 128 + signals.number_of(interrupt)
    return status


def _give_up_output() -> None:
    """Let the interpreter's end find nothing more to write to standard output."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ortrain",
        description="Train PyTorch models through an ordinary ONNX graph.",
    )
    parser.add_argument("--version", action=Version, nargs=0, help="show versions and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    train.add_to(commands)
    demo.add_to(commands)
    artifacts.add_to(commands)
    ondevice.add_to(commands)
    optimize.add_to(commands)
    quantize.add_to(commands)
    validate.add_to(commands)
    check.add_to(commands)
    run.add_to(commands)
    return parser

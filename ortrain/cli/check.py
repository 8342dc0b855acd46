"""``ortrain check PATH…``: whether files are as they were written."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ortrain.cli.arguments import path
from ortrain.cli.usage import UsageError, told
from ortrain.errors import OrtrainError
from ortrain.files import checksums, seal


def add_to(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "check",
        help="compare files with their checksums",
        description="Compare checkpoints, artifacts, exported models and the directories that "
        "`ortrain train` makes with the checksums in them.",
    )
    parser.add_argument("paths", type=path, nargs="+", metavar="PATH", help="a file or a directory")
    parser.add_argument(
        "--seal",
        action="store_true",
        help="write new checksums into models that another program has changed on purpose",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Check as the options say; returns the exit status."""
    faulty = []
    for place in options.paths:
        if place.is_dir() and options.seal:
            raise UsageError(f"{place}: is a directory; name the models to seal")
        for file in _files(place):
            if options.seal:
                _seal(file)
            try:
                found = _checked(file)
            except (OrtrainError, OSError) as error:
                faulty.append(file)
                found = told(error) if isinstance(error, OrtrainError) else str(error)
            print(f"{file}: {found}")
    if faulty:
        raise UsageError(
            f"{len(faulty)} not whole: {faulty[0]}{' …' if len(faulty) > 1 else ''}; take whole "
            "copies, make them anew, or seal with --seal what was changed on purpose"
        )
    return 0


def _files(place: Path) -> list[Path]:
    """What is checked of a path: of a directory, itself and its files that may have a seal."""
    if not place.is_dir():
        return [place]
    suffixes = (".onnx", ".ort", "checkpoint", ".pt")
    return [place, *sorted(p for p in place.iterdir() if p.is_file() and p.name.endswith(suffixes))]


def _checked(place: Path) -> str:
    if place.is_dir():
        checksums.check(place, whole=True)
        return f"as in {checksums.NAME}" if checksums.is_written(place) else "has no checksums"
    return (
        "whole" if seal.is_model_whole(place, f"file {place}", strict=True) else "has no checksum"
    )


def _seal(file: Path) -> None:
    try:
        if not seal.seal_again(file):
            raise UsageError(f"{file}: has no place for a checksum; save it again with ortrain")
    except OSError as error:
        raise UsageError(f"{file}: cannot be sealed ({error.strerror or error})") from error
    except OrtrainError as error:
        raise UsageError(told(error)) from error

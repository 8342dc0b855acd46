"""Types of arguments that commands share: what they accept, and what they say of anything else.

Every number of a command line goes through ``_number`` and every path through ``path``, so that
nothing behind them sees a number without bounds or a path that no system takes.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import TypeVar

from ortrain.cli.usage import excerpt
from ortrain.files.names import expect_name_part

_Number = TypeVar("_Number", int, float)

# Python's own int and float read more: digits of other scripts, underscores, spaces, nan. What
# this command wrote into a report or a script is to mean the same to every other program.
_WHOLE = re.compile(r"[+-]?[0-9]+")
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")

LARGEST = 2**31 - 1
"""Of the counts: more than any run can do, and within what every library behind takes."""


def _int(text: str) -> int:
    if not _WHOLE.fullmatch(text):
        raise ValueError(text)
    digits = text.lstrip("+-").lstrip("0")
    # Python refuses to convert more than 4300 digits; twenty are beyond every bound already.
    size = int(digits[:20] or "0")
    return -size if text.startswith("-") else size


def _float(text: str) -> float:
    if not _DECIMAL.fullmatch(text):
        raise ValueError(text)
    return float(text)


def _number(
    convert: Callable[[str], _Number],
    accepts: Callable[[_Number], bool],
    wanted: str,
    largest: float = inf,
) -> Callable[[str], _Number]:
    def parse(text: str) -> _Number:
        try:
            value = convert(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{excerpt(text)}' is not {wanted}") from None
        if value > largest:
            raise argparse.ArgumentTypeError(f"'{excerpt(text)}' is more than {largest}")
        if not accepts(value):
            raise argparse.ArgumentTypeError(f"'{excerpt(text)}' is not {wanted}")
        return value

    return parse


count = _number(_int, lambda value: value >= 1, "a whole number from 1 up", LARGEST)
whole = _number(_int, lambda value: value >= 0, "a whole number from 0 up", LARGEST)
seed = _number(_int, lambda value: 0 <= value < 2**32, "a whole number from 0 to 4294967295")
positive = _number(_float, lambda value: 0 < value < inf, "a number above 0")
not_negative = _number(_float, lambda value: 0 <= value < inf, "a number from 0 up")
share = _number(_float, lambda value: 0 <= value <= 1, "a share, 0 to 1")
probability = _number(_float, lambda value: 0 <= value < 1, "a probability below 1")


def names(text: str) -> tuple[str, ...]:
    """Names between commas."""
    found = tuple(name.strip() for name in text.split(","))
    if not all(found):
        raise argparse.ArgumentTypeError(
            f"'{excerpt(text)}' is not a list of names such as text,label"
        )
    return found


def name_part(text: str) -> str:
    """The beginning or the end of files' names."""
    try:
        return expect_name_part("it", text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"'{excerpt(text)}' is no part of a file's name, as it has a / or \\"
        ) from None


def column_names(text: str) -> tuple[str, ...]:
    """Names between commas, each once."""
    found = names(text)
    for name in found:
        if found.count(name) > 1:
            raise argparse.ArgumentTypeError(
                f"'{excerpt(text)}' has the name '{excerpt(name)}' more than once"
            )
    return found


def path(text: str) -> Path:
    """A path that the system can look up, whether or not there is anything."""
    if not text:
        raise argparse.ArgumentTypeError("an empty text is not a path")
    try:
        # Some systems have names of any bytes. Reports are written in UTF-8, and so are the paths
        # that the libraries behind are given.
        text.encode()
        Path(text).stat()
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"'{excerpt(text)}' is not a path in UTF-8 without NUL characters"
        ) from None
    except OSError as error:
        # All else has a better place: only who opens the path knows what it is wanted for.
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise argparse.ArgumentTypeError(
                f"'{excerpt(text)}' is not a path ({os.strerror(error.errno)})"
            ) from None
    return Path(text)


def new_directory(text: str) -> Path:
    """The path of a directory to make, which has a name of its own."""
    found = path(text)
    if found.name in ("", ".."):
        raise argparse.ArgumentTypeError(
            f"'{excerpt(text)}' is not the name of a directory to make"
        )
    # Beside it there is going to be one with a longer name while the run is under way.
    path(f"{found}.unfinished")
    return found


def model(text: str) -> str:
    """A model's name, or the path of its directory."""
    path(text)
    return text

"""What a command was asked to do and cannot: one line on stderr and an exit status."""

from __future__ import annotations

import argparse
import textwrap
from typing import NoReturn

from ortrain.errors import OrtrainError

# Characters of a reason that a line tells; a library's can be a page.
_REASON = 300


class CommandError(Exception):
    """Raised when a command cannot go on.

    The message is one line that names the place and the remedy; ``main`` prints it on stderr and
    exits with ``status``. Characters that do not show, a line end in a file's name for one, are
    written as escapes.
    """

    status = 1

    def __init__(self, message: str) -> None:
        super().__init__(visible(message))


class UsageError(CommandError):
    """Raised for what the user can put right: a file, a row, a name, an option."""

    status = 2


class FileError(CommandError):
    """Raised where a file cannot be written, as on a full disk; what was there is kept."""

    status = 2


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line as well."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and a line that leads to ``--help``."""
        self.exit(2, f"{self.prog}: error: {visible(message)}; see {self.prog} --help\n")


def visible(text: str) -> str:
    """The text with every character that does not show as an escape: all of it is one line."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in text
    )


def excerpt(text: str) -> str:
    """As much of a text as a line can hold beside other words."""
    return text if len(text) <= 32 else text[:31] + "…"


def told(error: OrtrainError) -> str:
    """What an error of ortrain's says: what, the reason, and the remedy."""
    parts = (error.what, error.because, error.help)
    what, reason, remedy = (" ".join(text.split()) for text in parts)
    reason = textwrap.shorten(reason, _REASON, placeholder="…")
    return what + (f" ({reason})" if reason else "") + (f"; {remedy}" if remedy else "")


def one_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's name if it has no message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__

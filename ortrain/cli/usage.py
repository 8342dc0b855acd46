"""What a command was asked to do and cannot: one line on stderr and an exit status."""

from __future__ import annotations

import argparse
from typing import NoReturn

from ortrain.errors import OrtrainError


class CommandError(Exception):
    """Raised when a command cannot go on.

    The message is one line that names the place and the remedy; ``main`` prints it on stderr and
    exits with ``status``.
    """

    status = 1


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
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def told(error: OrtrainError) -> str:
    """What an error of ortrain's says, and the remedy."""
    return f"{error.what}; {error.help}" if error.help else error.what


def one_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's name if it has no message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__

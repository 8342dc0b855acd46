"""Files that are read are regular ones: a pipe would be waited for, a device read without end."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ortrain.errors import InputError

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


def other_kind(mode: int) -> str:
    """What something with this mode is; empty for a regular file."""
    return next((name for holds, name in _KINDS if holds(mode)), "")


def expect_regular(path: str | os.PathLike[str]) -> Path:
    """A path of a file to read. Where there is nothing, whoever opens it says so.

    Raises:
        InputError: it leads to a directory, a pipe, a socket or a device; or to a file that may not
            be read; or its links lead nowhere.
    """
    help = "give a regular file; write what a program prints to one first"
    try:
        mode = Path(path).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if not Path(path).is_symlink():
            return Path(path)
        told = f"is a link to {os.fspath(Path(path).readlink())!r}, where there is nothing"
        help = "put the file there, or remove the link"
    except OSError as error:
        told = f"cannot be reached: {error.strerror}"
        help = "check its links and the permissions of its folders"
    else:
        if kind := other_kind(mode):
            told = f"is {kind}, and not a file that can be read"
        elif os.access(path, os.R_OK):
            return Path(path)
        else:
            told, help = "may not be read", "change its permissions"
    raise InputError(f"{os.fspath(path)} {told}", help=help)

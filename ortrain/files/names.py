"""Names that become those of files: they stay in the folder that they are joined to."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath, PureWindowsPath

_RESERVED = {"con", "prn", "aux", "nul", *(f"{n}{i}" for n in ("com", "lpt") for i in range(1, 10))}


def expect_name(argument: str, name: str, *, part: bool = False) -> str:
    """A text that is the name of a file, or with ``part`` the beginning or the end of one.

    Args:
        argument: what it is an argument of, for the error.
        name: to be joined to a folder.
        part: whether other text of the name follows it, or comes before it; it may be empty then.

    Raises:
        ValueError: it would lead elsewhere, or no system can have such a file.
    """
    if any(mark in name for mark in ("/", "\\", "\0")):
        why = "a name without / and \\: name the folder where there is an argument for it"
    elif not part and name in ("", ".", ".."):
        why = "the name of a file"
    elif not part and name.split(".")[0].rstrip().lower() in _RESERVED:
        why = "another name: some systems keep this one for a device"
    else:
        return name
    raise ValueError(f"{argument}={name!r}: expected {why}")


def expect_within(folder: Path, name: str | os.PathLike[str]) -> Path:
    """The path of a file that another file names by its place in a folder.

    A name with folders in it is one, as ``onnx/model.onnx_data``. What is a link in the folder is
    not looked at: it is of who holds it, not of who wrote the name.

    Raises:
        ValueError: it leads out of the folder.
    """
    text = os.fspath(name)
    both = (PurePosixPath(text), PureWindowsPath(text))
    if (
        not text
        or "\0" in text
        or any(path.is_absolute() or path.drive or ".." in path.parts for path in both)
    ):
        raise ValueError(f"{text!r} leaves the folder {os.fspath(folder)}")
    return folder / text

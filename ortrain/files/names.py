"""Names that become those of files: they stay in the folder that they are joined to."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath, PureWindowsPath


def expect_name_part(argument: str, text: str) -> str:
    """A text that becomes the beginning or the end of a file's name.

    Args:
        argument: what it is an argument of, for the error.
        text: to be joined to the rest of the name, and to a folder.

    Raises:
        ValueError: it would lead elsewhere, or no system can have such a file.
    """
    if any(mark in text for mark in ("/", "\\", "\0")):
        raise ValueError(f"{argument}={text!r}: expected a part of a name, without / and \\")
    return text


def leads_out(name: str) -> bool:
    """Whether a text is not the place of a file within a folder, as ``onnx/model.onnx_data`` is.

    Links in the folder are not looked at: they are of who holds it, not of who wrote the name.
    """
    paths = (PurePosixPath(name), PureWindowsPath(name))
    out = any(path.anchor or ".." in path.parts for path in paths)
    return out or not name or "\0" in name


def expect_within(folder: Path, name: str | os.PathLike[str]) -> Path:
    """The path of a file that is named by its place in a folder.

    Raises:
        ValueError: it leads out of the folder.
    """
    if leads_out(os.fspath(name)):
        raise ValueError(f"{os.fspath(name)!r} leaves the folder {os.fspath(folder)}")
    return folder / name

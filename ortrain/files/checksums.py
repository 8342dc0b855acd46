"""``SHA256SUMS``: the checksums of a folder's files, as ``sha256sum --check`` reads them."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from ortrain.errors import InputError, listing
from ortrain.files.regular import expect_regular

NAME = "SHA256SUMS"

_LINE = re.compile(r"([0-9a-f]{64})  (.+)")


def write(folder: Path) -> None:
    """Writes the checksums of all files in a folder; those of folders in it are left out.

    Raises:
        OSError: a file cannot be read, or this one not be written.
    """
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != NAME)
    rows = [f"{sha256(path)}  {path.name}\n" for path in files]
    with (folder / NAME).open("w", encoding="utf-8") as file:
        file.writelines(rows)


def is_written(folder: Path) -> bool:
    """Whether a folder has checksums: they are written last, so all of it is there."""
    return (folder / NAME).is_file()


def check(folder: Path, *, whole: bool = False) -> None:
    """Raises where a folder has files that are not as they were written.

    Args:
        folder: to check; one without checksums passes.
        whole: whether files may not be missing either.

    Raises:
        InputError: a file is another than its checksum says, or is missing.
    """
    try:
        text = expect_regular(folder / NAME).read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read {folder / NAME}", because=str(error), help=f"make {folder} anew"
        ) from error
    faults = []
    for number, row in enumerate(text.splitlines(), start=1):
        match = _LINE.fullmatch(row)
        if match is None or Path(match[2]).name != match[2]:
            faults.append(f"row {number} of {NAME} is no checksum and name")
            continue
        path = folder / match[2]
        if not path.is_file():
            if whole:
                faults.append(f"{match[2]} is missing")
        elif sha256(path) != match[1]:
            faults.append(f"{match[2]} has another checksum than in {NAME}")
    if faults:
        raise InputError(
            f"{folder} is damaged",
            because=listing(faults, 3),
            help=f"take a whole copy of it; where its files were changed on purpose, remove {NAME}",
        )


def sha256(path: Path) -> str:
    """The checksum of a file, in hexadecimal digits.

    Raises:
        InputError: it is no regular file.
        OSError: it cannot be read.
    """
    with expect_regular(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

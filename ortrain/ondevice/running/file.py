"""Files that are either replaced as a whole or left as they are."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from ortrain.errors import SaveError

# Some file systems synchronize no folders.
_NOT_OFFERED = (errno.EINVAL, errno.ENOTSUP)


def replace_file(
    path: str | os.PathLike[str], chunks: Iterable[bytes | memoryview], what: str
) -> None:
    """Writes a file beside the one that is there, and puts it in its place once it is on the disk.

    Args:
        path: of the file; a symbolic link stays one.
        chunks: the content.
        what: what the file is, for the error.

    Raises:
        SaveError: the content could not be written, and the file that was there is untouched; or
            the folder could not be synchronized, and the new file is there.
    """
    target = Path(os.path.realpath(path))
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with unfinished.open("xb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(target)
    except BaseException as error:
        unfinished.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise SaveError(
            f"cannot save the {what} {os.fspath(path)}",
            because=str(error),
            help="what was there before is unchanged; make room or choose another place, and save "
            "again",
        ) from error
    try:
        _synchronize(target.parent)
    except OSError as error:
        raise SaveError(
            f"cannot tell whether the {what} {os.fspath(path)} would outlast a power failure",
            because=f"its folder could not be synchronized: {error}",
            help="the new file is complete and in its place; save again to be sure",
        ) from error


def _synchronize(folder: Path) -> None:
    """Puts a folder's entries on the disk, where the system can."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise
    finally:
        os.close(descriptor)

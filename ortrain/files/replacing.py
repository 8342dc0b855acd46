"""Files that are either replaced as a whole or left as they are."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ortrain.errors import OrtrainError, SaveError
from ortrain.files.lock import hold, is_abandoned, is_open
from ortrain.files.regular import other_kind

# Some file systems synchronize no folders.
_NOT_OFFERED = (errno.EINVAL, errno.ENOTSUP)
# Bytes of a file's name that its unfinished neighbour repeats; most systems allow 255.
_REPEATED = 200


def replace_file(
    path: str | os.PathLike[str], chunks: Iterable[bytes | memoryview], what: str
) -> None:
    """Writes a file beside the one that is there, and puts it in its place once it is on the disk.

    Args:
        path: of the file; a symbolic link stays one.
        chunks: the content.
        what: what the file is, for the error.

    Raises:
        SaveError: as :func:`replacing` does.
    """
    with replacing(path, what) as file:
        for chunk in chunks:
            file.write(chunk)


@contextmanager
def replacing(path: str | os.PathLike[str], what: str) -> Iterator[BinaryIO]:
    """A new file, open for writing and reading, that takes the place of another at the end.

    What a process that was killed meanwhile has left beside it is removed.

    Args:
        path: of the file; a symbolic link stays one, and what it leads to is replaced.
        what: what the file is, for the error.

    Raises:
        SaveError: the content could not be written, and the file that was there is untouched; or
            the folder could not be synchronized, and the new file is there.
    """
    unfinished: Path | None = None
    try:
        target = regular(path)
        remove_abandoned(target.parent, re.escape(_stem(target)))
        unfinished, file = _beside(target)
        with file:
            yield file
            file.flush()
            with contextlib.suppress(OSError):  # the permissions that the user gave it
                unfinished.chmod(stat.S_IMODE(target.stat().st_mode))
            os.fsync(file.fileno())
            if os.name != "nt":  # where an open file cannot be renamed, and cannot be locked
                unfinished.replace(target)
        if os.name == "nt":
            unfinished.replace(target)
    except BaseException as error:
        if unfinished is not None:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
        if not isinstance(error, OSError | ValueError) or isinstance(error, SaveError):
            raise
        raise SaveError(
            f"cannot save the {what} {os.fspath(path)}",
            because=str(error),
            help="what was there before is unchanged; make room or choose another place, and save "
            "again",
        ) from error
    try:
        synchronize(target.parent)
    except OSError as error:
        raise SaveError(
            f"cannot tell whether the {what} {os.fspath(path)} would outlast a power failure",
            because=f"its folder could not be synchronized: {error}",
            help="the new file is complete and in its place; save again to be sure",
        ) from error


@contextmanager
def staged(folder: Path, stem: str, what: str) -> Iterator[Path]:
    """A folder whose files come into another one at the end, once all of them are on the disk.

    They come one by one, in the reverse order of their names: ``x.onnx.data`` before ``x.onnx``;
    those of folders within it into folders of the same names. What a process that was killed
    meanwhile has left is removed.

    Args:
        folder: made where it does not exist.
        stem: of the name of the folder that is made within it.
        what: what the files are, for the error.

    Raises:
        SaveError: they could not be written; unless it says so, all files are as they were.
    """
    unfinished: Path | None = None
    descriptor = -1
    moved: list[str] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_abandoned(folder, re.escape(stem))
        unfinished, descriptor = _folder_beside(folder / stem)
        yield unfinished
        synchronize_tree(unfinished)
        files = [path for path in unfinished.rglob("*") if not path.is_dir()]
        for file in sorted(files, reverse=True):
            name = file.relative_to(unfinished)
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            file.replace(regular(place))
            moved.append(str(name))
        for place in {folder / name for name in (Path(each).parent for each in moved)} | {folder}:
            synchronize(place)
    except (OSError, ValueError) as error:
        if isinstance(error, OrtrainError):
            raise
        so_far = f"replaced so far: {', '.join(moved)}" if moved else "nothing has been replaced"
        raise SaveError(
            f"cannot save the {what} in {os.fspath(folder)}",
            because=str(error),
            help=f"{so_far}; make room or choose another place, and save again",
        ) from error
    finally:
        if unfinished is not None:
            shutil.rmtree(unfinished, ignore_errors=True)
        if descriptor >= 0:
            os.close(descriptor)


def regular(path: str | os.PathLike[str]) -> Path:
    """Where a path leads, which is a regular file or nothing yet.

    Raises:
        OSError: it is a directory, a device or the like; its links lead in a circle; its folder
            does not exist.
        ValueError: it is no path.
    """
    target = Path(os.path.realpath(path))
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        if not target.parent.exists():
            raise FileNotFoundError(f"there is no folder {os.fspath(target.parent)!r}") from None
        return target
    if kind := other_kind(mode):
        raise OSError(f"it is {kind}, and no file that could be replaced")
    return target


def synchronize(folder: Path) -> None:
    """Puts a folder's entries on the disk, where the system can.

    Raises:
        OSError: the disk reports an error.
    """
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


def synchronize_tree(folder: Path) -> None:
    """Puts all files of a folder, and of the folders in it, on the disk.

    Raises:
        OSError: the disk reports an error.
    """
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            with Path(place, name).open("rb") as file:
                os.fsync(file.fileno())
        synchronize(Path(place))


def _beside(target: Path) -> tuple[Path, BinaryIO]:
    """A new file in the target's folder, and the file, locked as long as it is open."""
    while True:
        path = target.with_name(f".{_stem(target)}.{secrets.token_hex(4)}.tmp")
        file = path.open("x+b")
        if hold(file) and is_open(path, file):
            return path, file
        file.close()  # removed as abandoned between the two calls


def _folder_beside(target: Path) -> tuple[Path, int]:
    """A new folder, and its descriptor, locked as long as it is open."""
    while True:
        path = target.with_name(f".{_stem(target)}.{secrets.token_hex(4)}.tmp")
        path.mkdir()
        if os.name == "nt":
            return path, -1
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue  # removed as abandoned between the two calls
        if hold(descriptor) and is_open(path, descriptor):
            return path, descriptor
        os.close(descriptor)  # or between these two


def remove_abandoned(folder: Path, names: str) -> None:
    """Removes what processes that were killed while they saved files have left beside them.

    Args:
        folder: that the files are in.
        names: of the files, as a regular expression.
    """
    pattern = re.compile(rf"\.(?:{names})\.[0-9a-f]{{8}}\.tmp")
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if pattern.fullmatch(entry.name) and is_abandoned(Path(entry.path)):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    with contextlib.suppress(OSError):
                        Path(entry.path).unlink()


def _stem(target: Path) -> str:
    """The target's name, or a hash of it where there is no room for more than the name."""
    name = os.fsencode(target.name)
    return target.name if len(name) <= _REPEATED else hashlib.sha256(name).hexdigest()[:16]

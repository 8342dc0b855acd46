"""Compiled graphs and what was found of them, kept between processes: the same in, the same out.

Every entry is named by a hash of all that it was made from, ortrain's own source included, so a
stale entry cannot be hit. An entry is one file, so that it is there whole or not at all::

    sha256 of the entry's name and of all that follows
    count of the programs, and the size of each
    the programs, as ONNX

A note has its text in the place of the programs.

Nothing of it is parsed before the hash is right, and what is parsed are the bytes that were hashed.
Export always runs; what follows it is skipped where its result is known.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import itertools
import os
import shutil
import stat
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

from ortrain.errors import GraphError, SaveError, warn_caller
from ortrain.files.replacing import remove_abandoned, replace_file
from ortrain.program import Program

SUFFIX, NOTE = ".programs", ".note"
# Nothing else in the folder is touched, which may be one that has other things in it.
_ENTRIES = ["[0-9a-f]" * 64 + suffix for suffix in (SUFFIX, NOTE)]
_ENTRY = r"[0-9a-f]{64}\.(programs|note)"

_LIBRARIES = ("torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime")
_SEAL = hashlib.sha256().digest_size

T = TypeVar("T")


class Cache:
    """A folder of programs.

    Whatever happens to the folder, programs are made: a damaged entry is dropped and made again, a
    folder that cannot be used is none. Both are told once, with an ``OrtrainWarning``.

    Args:
        folder: made where it does not exist; None caches nothing.
        limit: bytes that the entries may have; those used longest ago make way. None is no bound.
    """

    def __init__(self, folder: Path | str | None, limit: int | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.limit = limit
        self._told: set[str] = set()
        # Entries of which nobody has said that they serve, and whether they were read.
        self._unproven: dict[Path, bool] = {}

    def programs(
        self, parts: Iterable[object], make: Callable[[], Sequence[Program]]
    ) -> Sequence[Program]:
        """The programs made from ``parts``: read where they are known, else made and written.

        Args:
            parts: everything that decides what ``make`` returns, as bytes or with a stable repr.
            make: makes the programs.
        """
        return self.served(parts, make, lambda programs: programs)

    def served(
        self,
        parts: Iterable[object],
        make: Callable[[], Sequence[Program]],
        serve: Callable[[Sequence[Program]], T],
    ) -> T:
        """What ``serve`` makes of the programs made from ``parts``.

        Programs that were read and that it refuses are made again; those that were made and that it
        refuses are not written.

        Args:
            parts: everything that decides what ``make`` returns, as bytes or with a stable repr.
            make: makes the programs.
            serve: takes them into use; what it raises on programs just made is raised.
        """
        entry = self._named(parts, SUFFIX)
        if entry is None:
            return serve(make())
        known = self._read(entry, Program.parse)
        if known is not None:
            try:
                result = serve(known)
            except Exception as error:
                self._drop(entry, error)
            else:
                self._unproven[entry] = True
                return result
        programs = make()
        result = serve(programs)
        try:
            written = self._write(entry, [program.serialize() for program in programs])
        except GraphError:  # above 2 GiB, which no runtime would be given either
            return result
        if written:
            self._unproven[entry] = False
        return result

    def note(self, parts: Iterable[object]) -> str:
        """The text kept of ``parts``; empty where there is none.

        Args:
            parts: everything that it depends on, as bytes or with a stable repr.
        """
        found = self._read(self._named(parts, NOTE), lambda part: str(bytes(part), "utf-8"))
        return found[0] if found else ""

    def keep_note(self, parts: Iterable[object], text: str) -> None:
        """Keeps a text, which takes the place of an earlier one.

        Args:
            parts: as of :meth:`note`.
            text: for a later process, or none.
        """
        if (entry := self._named(parts, NOTE)) is not None:
            self._write(entry, [text.encode()])

    def begin(self) -> None:
        """What is read and written from now on is proven, or distrusted, together."""
        self._unproven.clear()

    def distrust(self) -> bool:
        """Drops what was read and written since :meth:`begin`, since it does not serve.

        Returns:
            Whether some of it was read, so that it may help to make it anew.
        """
        entries, read = [*self._unproven], any(self._unproven.values())
        self._unproven.clear()
        for entry in entries:
            _remove(entry)
        return read

    def remade(self) -> None:
        """Tells that what was distrusted serves now: only then was it the entries' fault."""
        self._tell("damaged", f"graphs kept in {str(self.folder)!r} did not serve", "they are new")

    # -- files -------------------------------------------------------------------------------------

    def _named(self, parts: Iterable[object], suffix: str) -> Path | None:
        """The entry of something; None where nothing is kept."""
        return None if self.folder is None else self.folder / f"{fingerprint(parts)}{suffix}"

    def _read(self, entry: Path | None, parse: Callable[[memoryview], T]) -> list[T] | None:
        """What is in an entry; None where it is absent, or damaged and then gone."""
        if entry is None:
            return None
        try:
            found = [parse(part) for part in _unsealed(entry)]
        except FileNotFoundError:  # absent, or removed this moment by another process
            return None
        except (PermissionError, NotADirectoryError) as error:
            self._unusable(error)
            return None
        except Exception as error:
            self._drop(entry, error)
            return None
        with contextlib.suppress(OSError):  # a folder that can only be read
            os.utime(entry)
        return found

    def _write(self, entry: Path, parts: Sequence[bytes]) -> bool:
        """Writes an entry whole or not at all; a full disk costs the entry, not the training."""
        assert self.folder is not None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_abandoned(self.folder, _ENTRY)
            replace_file(entry, _sealed(entry.name, parts), "cache entry")
            self._make_way(entry)
        except OSError as error:
            self._unusable(error)
            return False
        return True

    def _make_way(self, entry: Path) -> None:
        """Removes the entries used longest ago, as many as are too much beside a new one."""
        assert self.folder is not None
        if self.limit is None:
            return
        found = []
        for path in itertools.chain(*map(self.folder.glob, _ENTRIES)):
            with contextlib.suppress(OSError):  # another process has removed it
                status = path.lstat()
                found.append((status.st_mtime_ns, path.name, status.st_size))
        total = sum(size for _, _, size in found)
        for _, name, size in sorted(found):
            if total <= self.limit:
                break
            if name != entry.name:
                _remove(self.folder / name)
                total -= size

    # -- words -------------------------------------------------------------------------------------

    def _drop(self, entry: Path, error: Exception) -> None:
        _remove(entry)
        self._tell("damaged", f"a graph kept in {str(self.folder)!r} is damaged ({_said(error)})")

    def _unusable(self, error: Exception) -> None:
        self._tell(
            "unusable",
            f"cache_dir={str(self.folder)!r} cannot be used ({_said(error)})",
            "graphs are made without it",
        )

    def _tell(self, kind: str, what: str, instead: str = "it is made again") -> None:
        """Warns once of each kind, at the line outside of ortrain and torch that called."""
        if kind in self._told:
            return
        self._told.add(kind)
        warn_caller(f"{what}; {instead}")


def _said(error: Exception) -> str:
    text = error.because if isinstance(error, SaveError) else str(error)
    lines = text.strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# -- sealed files ----------------------------------------------------------------------------------


def _sealed(name: str, parts: Sequence[bytes]) -> list[bytes]:
    """The bytes of an entry, in pieces."""
    sizes = struct.pack(f"<{len(parts) + 1}Q", len(parts), *map(len, parts))
    digest = hashlib.sha256(name.encode())
    for piece in (sizes, *parts):
        digest.update(piece)
    return [digest.digest(), sizes, *parts]


def _unsealed(entry: Path) -> list[memoryview]:
    """The parts of an entry.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not what was written.
    """
    if not stat.S_ISREG(entry.lstat().st_mode):
        raise ValueError("it is no file")  # a pipe would keep us waiting
    with entry.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        seal, count = file.read(_SEAL), file.read(8)
        # Not more than there is: a damaged count must not ask for the machine's memory.
        number = min(struct.unpack("<Q", count.ljust(8, b"\0"))[0], size // 8)
        table = file.read(8 * number)
        sizes = struct.unpack(f"<{len(table) // 8}Q", table[: len(table) // 8 * 8])
        if _SEAL + 8 + len(table) + sum(sizes) != size:
            raise ValueError("its size is not that of its parts")
        data = file.read()
    digest = hashlib.sha256(entry.name.encode())
    for piece in (count, table, data):
        digest.update(piece)
    if digest.digest() != seal:
        raise ValueError("its hash is another")
    parts, rest = [], memoryview(data)
    for part in sizes:
        parts.append(rest[:part])
        rest = rest[part:]
    return parts


def _remove(path: Path) -> None:
    """Removes a file, or whatever stands in its place, as far as one may."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


# -- names -----------------------------------------------------------------------------------------


def fingerprint(parts: Iterable[object]) -> str:
    """A hash of the parts, of the versions of all libraries involved and of ortrain's source."""
    digest = hashlib.sha256(_versions().encode())
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


@cache
def _versions() -> str:
    """Versions of the libraries, and a hash of ortrain's own files (2 ms)."""
    source = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        source.update(str(path.relative_to(root)).encode() + path.read_bytes())
    versions = [f"{name} {importlib.metadata.version(name)}" for name in _LIBRARIES]
    return " ".join([*versions, source.hexdigest()])

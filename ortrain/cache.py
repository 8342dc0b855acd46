"""Compiled graphs kept between processes: the same bytes in, the same bytes out.

Every entry is named by a hash of all that it was made from, ortrain's own source included, so a
stale entry cannot be hit; its manifest has the hashes of its files, so a damaged one is none.
Export always runs; what follows it is skipped where its result is known.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

from ortrain.program import Program

# Of an entry: its files and their hashes.
MANIFEST = "manifest.json"

_LIBRARIES = ("torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime")


class Cache:
    """A folder of programs.

    Args:
        folder: made where it does not exist; None caches nothing.
    """

    def __init__(self, folder: Path | str | None) -> None:
        self.folder = None if folder is None else Path(folder)

    def programs(
        self, parts: Iterable[object], make: Callable[[], Sequence[Program]]
    ) -> Sequence[Program]:
        """The programs made from ``parts``: read where they are known, else made and written.

        Args:
            parts: everything that decides what ``make`` returns, as bytes or with a stable repr.
            make: makes the programs.
        """
        if self.folder is None:
            return make()
        entry = self.folder / fingerprint(parts)
        known = self._read(entry)
        if known is not None:
            return known
        programs = make()
        self._write(entry, programs)
        return programs

    def _read(self, entry: Path) -> list[Program] | None:
        """The programs of an entry; None where it is absent, partial or damaged, and then gone."""
        if not entry.exists():
            return None
        try:
            digests = json.loads((entry / MANIFEST).read_text())
            if all(_digest((entry / name).read_bytes()) == d for name, d in digests.items()):
                count = sum(name.endswith(".onnx") for name in digests)
                return [Program.load(entry / f"{i}.onnx") for i in range(count)]
        except Exception:
            # Half of it after a crash, or another version's format: as good as absent.
            pass
        shutil.rmtree(entry, ignore_errors=True)
        return None

    def _write(self, entry: Path, programs: Sequence[Program]) -> None:
        """Writes an entry whole or not at all; a full disk costs the entry, not the training."""
        assert self.folder is not None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            half = Path(tempfile.mkdtemp(dir=self.folder, prefix="half-"))
        except OSError:
            return
        try:
            for i, program in enumerate(programs):
                program.save(half / f"{i}.onnx")
            digests = {file.name: _digest(file.read_bytes()) for file in half.iterdir()}
            (half / MANIFEST).write_text(json.dumps(digests))
            half.rename(entry)
        except OSError:
            shutil.rmtree(half, ignore_errors=True)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


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

"""Locks that a process holds while it lives, and no longer."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows, where a file that is open cannot be removed: that is its lock
    fcntl = None  # type: ignore[assignment]


# Where there are no locks, what nobody has written to for so many seconds has lost its writer.
LONG = 24 * 3600.0


class Lock:
    """A file that one process at a time holds.

    The system lets go of it when the process ends, however it ends; the file that a dead process
    leaves behind is taken over. Where the file system knows no locks, everyone gets one.

    Args:
        path: of the file, made when the lock is taken, and removed when it is released.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None

    def take(self) -> bool:
        """Takes the lock; False where another process holds it.

        Raises:
            OSError: the file cannot be made.
        """
        while True:
            file = self.path.open("a+b")
            if not hold(file):
                file.close()
                return False
            if is_open(self.path, file):
                break
            file.close()  # its holder has removed it between our two calls
        file.truncate(0)
        file.write(f"{os.getpid()}\n".encode())
        file.flush()
        self._file = file
        return True

    def holder(self) -> str:
        """Who holds the lock, for a message: ``"process 1234"``."""
        try:
            text = self.path.read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            text = ""
        return f"process {text}" if text.isdigit() else "another process"

    def release(self) -> None:
        """Lets go of the lock, if it is held, and removes its file."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            self.path.unlink()
        self._file.close()
        self._file = None


def hold(file: BinaryIO | int) -> bool:
    """Locks an open file or folder until it is closed; False where another process has it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True


def is_open(path: Path, file: BinaryIO | int) -> bool:
    """Whether a path still leads to an open file or folder."""
    descriptor = file if isinstance(file, int) else file.fileno()
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


def is_abandoned(path: Path) -> bool:
    """Whether nobody holds a file or folder that its writer locks, if the system can tell."""
    if fcntl is None:
        return True
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return time.time() - os.fstat(descriptor).st_mtime > LONG
    finally:
        os.close(descriptor)
    return True

"""Calls in processes of their own, which may end as they like."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Item = TypeVar("Item")

LIMIT = 120.0
"""Seconds after which a process counts as hanging."""


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        status: its exit status; minus the signal's number where one killed it.
        out: what it wrote to standard output.
        err: what it wrote to standard error.
        seconds: that it took.
    """

    status: int
    out: str
    err: str
    seconds: float


def each(items: Sequence[Item], call: Callable[[Item], str]) -> list[str]:
    """What a call says of each item; ``"crashed"`` where it ended its process.

    One process takes many items, and another goes on after it where it died.
    """
    found: list[str] = []
    while len(found) < len(items):
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            os.close(reading)
            with os.fdopen(writing, "wb") as results:
                _quiet()
                for item in items[len(found) :]:
                    pickle.dump(call(item), results)
                    results.flush()
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as results, contextlib.suppress(EOFError):
            while True:
                found.append(pickle.load(results))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status and len(found) < len(items):
            found.append(f"crashed with {status}")
    return found


def _quiet() -> None:
    """Lets a process say nothing."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)


def command(
    call: Callable[[], int], *, after: float | None = None, sent: int = signal.SIGKILL
) -> Ended:
    """Runs a command in a process of its own.

    Args:
        call: the command; its exit status.
        after: seconds after which it is sent a signal; None sends none.
        sent: the signal.
    """
    pipes = [os.pipe(), os.pipe()]  # which no limit of file sizes concerns
    started = time.monotonic()
    if (child := os.fork()) == 0:
        status = 70
        try:
            for number, (_, writing) in enumerate(pipes, start=1):
                os.dup2(writing, number)
            sys.stdout, sys.stderr = (
                io.TextIOWrapper(io.FileIO(number, "w"), write_through=True) for number in (1, 2)
            )
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            status = call()
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    for _, writing in pipes:
        os.close(writing)
    with ThreadPoolExecutor(2) as readers:
        texts = [readers.submit(_read, reading) for reading, _ in pipes]
        status = _awaited(child, started, after, sent)
    return Ended(status, texts[0].result(), texts[1].result(), time.monotonic() - started)


def _read(descriptor: int) -> str:
    with os.fdopen(descriptor, encoding="utf-8", errors="replace") as file:
        return file.read()


def _awaited(child: int, started: float, after: float | None, sent: int) -> int:
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        passed = time.monotonic() - started
        if after is not None and passed >= after:
            os.kill(child, sent)
            after = None
        if passed > LIMIT:
            os.kill(child, signal.SIGKILL)
            raise TimeoutError(f"a command has taken more than {LIMIT} seconds")
        time.sleep(0.002)


class Operations:
    """Counts what a process does to the files of a folder, and lets one of these fail.

    Args:
        folder: whose files.
        number: which operation, from 1; 0 counts alone.
        fail: is called before it.
    """

    _EVENTS = frozenset(
        ("open", "os.chmod", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "shutil.rmtree")
    )

    def __init__(self, folder: Path, number: int = 0, fail: Callable[[], None] | None = None):
        self.count = 0
        self._folder, self._number, self._fail = str(folder), number, fail

    def watch(self) -> None:
        """Begins, for the rest of the process."""
        synchronize = os.fsync

        def counted(descriptor: int) -> None:
            self._note()
            synchronize(descriptor)

        os.fsync = counted
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in self._EVENTS or not isinstance(arguments[0], str | os.PathLike):
            return
        reads = event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if not reads and os.fspath(arguments[0]).startswith(self._folder):
            self._note()

    def _note(self) -> None:
        self.count += 1
        if self.count == self._number and self._fail is not None:
            self._fail()


def told(value: Any) -> object:
    """A value of nested tensors and arrays as something that can be compared."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if hasattr(value, "tobytes"):
        return str(value.dtype), tuple(value.shape), value.tobytes()
    if isinstance(value, dict):
        return {key: told(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [told(child) for child in value]
    return value

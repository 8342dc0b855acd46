"""Calls in processes of their own, which may end as they like."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
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
    call: Callable[[], int],
    folder: Path,
    *,
    kill_after: float | None = None,
    sent: int = signal.SIGKILL,
) -> Ended:
    """Runs a command in a process of its own.

    Args:
        call: the command; its exit status.
        folder: where its output is kept meanwhile.
        kill_after: seconds after which it is sent a signal; None lets it end.
        sent: the signal.
    """
    streams = [folder / "stdout", folder / "stderr"]
    started = time.monotonic()
    if (child := os.fork()) == 0:
        status = 70
        try:
            for number, path in enumerate(streams, start=1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            status = call()
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)
    status = _awaited(child, started, kill_after, sent)
    texts = [path.read_text(errors="replace") if path.exists() else "" for path in streams]
    return Ended(status, texts[0], texts[1], time.monotonic() - started)


def _awaited(child: int, started: float, kill_after: float | None, sent: int) -> int:
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        passed = time.monotonic() - started
        if kill_after is not None and passed >= kill_after:
            os.kill(child, sent)
            kill_after = None
        if passed > LIMIT:
            os.kill(child, signal.SIGKILL)
            raise TimeoutError(f"a command has taken more than {LIMIT} seconds")
        time.sleep(0.002)


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

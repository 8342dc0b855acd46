"""Signals that ask a command to end: Ctrl-C, and what a terminal or a scheduler sends."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# SIGTERM comes before a kill, from schedulers and `timeout`; SIGHUP when a terminal closes.
ENDING = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


# Seconds after which a lost exception is raised again: more than what lost it still runs.
_AGAIN = 0.01


class Ended(KeyboardInterrupt):
    """A signal has asked the command to end.

    Args:
        number: of the signal.
        message: what to tell the user.
    """

    def __init__(self, number: int = signal.SIGINT, message: str = "") -> None:
        super().__init__(message)
        self.number = number


def number_of(interrupt: KeyboardInterrupt) -> int:
    """The signal behind an exception; Python's own is raised for Ctrl-C."""
    return interrupt.number if isinstance(interrupt, Ended) else signal.SIGINT


class _Again:
    """Has an `Ended` that Python swallows come once more.

    A signal may come while a destructor, a weak reference's callback or a hook of the garbage
    collector runs. What is raised there ends nowhere: Python prints it, and the command goes on.

    Args:
        handler: is called for each signal.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], None]) -> None:
        self._handler, self._before = handler, sys.unraisablehook
        self._timers: list[threading.Timer] = []
        self._is_told = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal, but not where Python tells of a lost exception: it were lost there."""
        if self._is_told:
            self._later(number)
        else:
            self._handler(number, frame)

    def _later(self, number: int) -> None:
        self._timers.append(threading.Timer(_AGAIN, _thread.interrupt_main, (number,)))
        self._timers[-1].start()

    def _tell(self, lost: sys.UnraisableHookArgs) -> None:
        if not isinstance(lost.exc_value, Ended):
            self._before(lost)
            return
        self._is_told = True
        try:
            self._later(lost.exc_value.number)
        finally:
            self._is_told = False

    def __enter__(self) -> _Again:
        sys.unraisablehook = self._tell
        return self

    def __exit__(self, *error: object) -> None:
        sys.unraisablehook = self._before
        while self._timers:
            self._timers.pop().join()


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Has a function called for each signal that asks to end, unless it is ignored (``nohup``)."""
    if threading.current_thread() is not threading.main_thread():
        # Python delivers signals to the main thread alone; elsewhere there are none to handle.
        yield
        return
    # None: a handler that Python did not set, and cannot put back.
    before = {number: signal.getsignal(number) for number in ENDING}
    taken = {n: old for n, old in before.items() if old not in (signal.SIG_IGN, None)}
    try:
        with _Again(handler) as again:
            for number in taken:
                signal.signal(number, again.handle)
            yield
    finally:
        for number, old in taken.items():
            signal.signal(number, old)


@contextmanager
def raised() -> Iterator[None]:
    """Has each of the signals raise `Ended` where the command is."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Ended(number)

    with _handled(end):
        yield


@contextmanager
def held_back() -> Iterator[Callable[[], int | None]]:
    """Holds the first signal back; the second one raises `Ended` at once.

    Yields:
        What tells the signal that has come; None as long as there is none.
    """
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            raise Ended(number)

    with _handled(note):
        yield lambda: came[0] if came else None


@contextmanager
def ignored() -> Iterator[None]:
    """Lets no signal end what is done in a moment, and must not be done by half."""
    with _handled(lambda number, frame: None):
        yield

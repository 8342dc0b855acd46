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
        for number in taken:
            signal.signal(number, handler)
        with _raised_again():
            yield
    finally:
        for number, old in taken.items():
            signal.signal(number, old)


@contextmanager
def _raised_again() -> Iterator[None]:
    """Has an `Ended` that Python swallows come once more.

    A signal may come while a destructor, a weak reference's callback or a hook of the garbage
    collector runs. What is raised there ends nowhere: Python prints it, and the command goes on.
    """
    before = sys.unraisablehook
    timers: list[threading.Timer] = []

    def note(lost: sys.UnraisableHookArgs) -> None:
        if not isinstance(lost.exc_value, Ended):
            before(lost)
            return
        # Not from here: it would be raised in this very function, and lost with it.
        timers.append(threading.Timer(_AGAIN, _thread.interrupt_main, (lost.exc_value.number,)))
        timers[-1].start()

    sys.unraisablehook = note
    try:
        yield
    finally:
        sys.unraisablehook = before
        for timer in timers:
            timer.join()


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

"""Signals that ask a command to end, wherever it is at that moment."""

from __future__ import annotations

import gc
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from ortrain.cli import signals

NUMBERS = [number for number in signals.ENDING if number in (signal.SIGINT, signal.SIGTERM)]
SPINS = 50_000_000  # seconds of them, where nothing ends the loop


class Owner:
    """Something that can be referred to weakly."""


def in_a_destructor(send: Callable[[], None]) -> None:
    class Destroyed:
        def __del__(self) -> None:
            send()

    Destroyed()


def in_the_callback_of_a_weak_reference(send: Callable[[], None]) -> None:
    owner = Owner()
    reference = weakref.ref(owner, lambda dead: send())
    del owner
    assert reference() is None


def in_a_weak_dictionary(send: Callable[[], None]) -> None:
    class Noted(weakref.WeakValueDictionary[str, Owner]):
        def __init__(self) -> None:
            super().__init__()
            remove = self._remove  # type: ignore[has-type]

            def removed(*arguments: object) -> None:
                send()
                remove(*arguments)

            self._remove = removed

    owner = Owner()
    owners = Noted()
    owners["one"] = owner
    del owner


def in_a_hook_of_the_garbage_collector(send: Callable[[], None]) -> None:
    def collected(phase: str, info: dict[str, int]) -> None:
        gc.callbacks.remove(collected)
        send()

    gc.callbacks.append(collected)
    gc.collect()


def in_a_generator_that_is_dropped(send: Callable[[], None]) -> None:
    def rows() -> Iterator[int]:
        try:
            yield 1
        finally:
            send()

    next(rows())


PLACES = [
    in_a_destructor,
    in_the_callback_of_a_weak_reference,
    in_a_weak_dictionary,
    in_a_hook_of_the_garbage_collector,
    in_a_generator_that_is_dropped,
]


def spin() -> None:
    """Works on, as a command does that has not heard of the signal."""
    for _ in range(SPINS):
        pass


@contextmanager
def held_back() -> Iterator[None]:
    """Holds the first signal back, which has come already."""
    with signals.held_back() as came:
        signal.raise_signal(signal.SIGINT)
        assert came() == signal.SIGINT
        yield


@pytest.mark.parametrize("handled", [signals.raised, held_back])
@pytest.mark.parametrize("number", NUMBERS, ids=[signal.Signals(n).name for n in NUMBERS])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_signal_ends_the_command_where_python_swallows_exceptions(
    place: Callable[[Callable[[], None]], None],
    number: int,
    handled: Callable[[], Callable[..., None]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    def work() -> None:
        with handled():
            place(lambda: signal.raise_signal(number))
            spin()

    with pytest.raises(signals.Ended) as ended:
        work()
    assert ended.value.number == number
    assert "ignored" not in capfd.readouterr().err


def test_a_signal_swallowed_twice_ends_the_command() -> None:
    def interrupted() -> None:
        in_a_destructor(lambda: signal.raise_signal(signal.SIGINT))

    def spin_and_be_interrupted() -> None:
        try:
            spin()
        finally:
            interrupted()

    def work() -> None:
        with signals.raised():
            interrupted()
            in_a_destructor(spin_and_be_interrupted)
            spin()

    with pytest.raises(signals.Ended):
        work()


def test_a_signal_swallowed_at_the_very_end_is_told() -> None:
    with pytest.raises(signals.Ended), signals.raised():
        in_a_destructor(lambda: signal.raise_signal(signal.SIGINT))


def test_what_others_lose_is_shown_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: shown.append(lost.exc_value))
    hook = sys.unraisablehook

    def fail() -> None:
        raise ValueError("no signal")

    with signals.raised():
        in_a_destructor(fail)
    assert [str(error) for error in shown] == ["no signal"]
    assert sys.unraisablehook is hook

"""Points in time, for measuring steps: the difference of two is in seconds.

On the CPU a mark is a number of seconds. A GPU works while the CPU goes on, so there it is an event
among its work; what lies between two events is the time that the work took, or, where the GPU had
to wait for it, the time until it came.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

clock: Callable[[], float] = time.perf_counter


class Event:
    """A point in the work of the current CUDA stream."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def __sub__(self, earlier: Event) -> float:
        """Seconds since an earlier one; both have been reached."""
        return earlier._event.elapsed_time(self._event) / 1e3

    def is_reached(self) -> bool:
        """Whether the GPU has done all work before it."""
        return self._event.query()

    def wait(self) -> None:
        """Until the GPU has reached it."""
        self._event.synchronize()


Mark = float | Event


def seconds(start: Mark, end: Mark) -> float:
    """Between two marks of one kind."""
    if isinstance(start, Event):
        assert isinstance(end, Event), "the marks of a step are of one kind"
        return end - start
    assert not isinstance(end, Event), "the marks of a step are of one kind"
    return end - start


def is_reached(mark: Mark, *, wait: bool = False) -> bool:
    """Whether a mark is in the past; it is where that is waited for."""
    if not isinstance(mark, Event):
        return True
    if wait:
        mark.wait()
    return mark.is_reached()


def now(device: torch.device | None) -> Mark:
    """A mark on a device: an event among a GPU's work, by `clock` elsewhere."""
    return Event() if device is not None and device.type == "cuda" else clock()


def like(mark: Mark) -> Mark:
    """A mark of the kind of another."""
    return Event() if isinstance(mark, Event) else clock()


__all__ = ["Event", "Mark", "clock", "is_reached", "like", "now", "seconds"]

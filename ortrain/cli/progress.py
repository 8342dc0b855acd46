"""The progress of a run: one line rewritten in place on a terminal, a line now and then elsewhere.

step  120/651  loss 0.3127  42.1 samples/s  2:07 left
"""

from __future__ import annotations

import os
import shutil
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

_WINDOW = 20
"""Steps that the rate is taken over: the first step, which may compile, drops out soon."""


class Progress:
    """Shows how far a run is.

    Args:
        stream: Where to write; a terminal gets one line that is rewritten.
        total: Steps of the whole run.
        done: Steps that were done before, when a run is resumed.
        seconds_between: Least time between two lines where the stream is no terminal.
        clock: Seconds, from anywhere, never going back.
    """

    def __init__(
        self,
        stream: TextIO,
        total: int,
        *,
        done: int = 0,
        seconds_between: float = 10.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._stream = stream
        self._total = total
        self._seconds_between = seconds_between
        self._clock = clock
        self._rewrites = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._is_open = False
        now = clock()
        self._marks: deque[tuple[float, int]] = deque([(now, done)], maxlen=_WINDOW + 1)
        self._samples: deque[int] = deque(maxlen=_WINDOW)
        self._written_at = now

    def update(self, step: int, loss: float, samples: int) -> None:
        """Tell that a step is done.

        Args:
            step: The number of steps that are done, this one included.
            loss: The step's loss.
            samples: Examples in the step's batch.
        """
        now = self._clock()
        self._marks.append((now, step))
        self._samples.append(samples)
        line = self._line(step, loss)
        if self._rewrites:
            columns = shutil.get_terminal_size().columns
            # ESC [K clears what a longer line before has left behind.
            self._stream.write(f"\r{line[: columns - 1]}\x1b[K")
            self._stream.flush()
            self._is_open = True
        elif step == self._total or now - self._written_at >= self._seconds_between:
            self._stream.write(line + "\n")
            self._stream.flush()
            self._written_at = now

    def close(self) -> None:
        """End the line, so that what is written next starts on its own."""
        if self._is_open:
            self._stream.write("\n")
            self._stream.flush()
            self._is_open = False

    def _line(self, step: int, loss: float) -> str:
        (start, first), (now, _) = self._marks[0], self._marks[-1]
        seconds = max(now - start, 1e-9)
        left = (self._total - step) * seconds / max(step - first, 1)
        width = len(str(self._total))
        return (
            f"step {step:>{width}}/{self._total}  loss {loss:.4f}  "
            f"{sum(self._samples) / seconds:.1f} samples/s  {duration(left)} left"
        )


def duration(seconds: float) -> str:
    """Seconds for people: ``0:07``, ``12:40``, ``3:05:00``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

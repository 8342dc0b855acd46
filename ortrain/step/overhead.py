"""What a run takes beside its steps: tracing, building, comparing, and autotuning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ortrain.step import marks


class Overhead:
    """Seconds of one module's calls that are no steps, by what they were for.

    Attributes:
        seconds: ``imports``, ``trace``, ``build``, ``parity``, ``autotuning``.
        began: when its first call came.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.began = marks.clock()
        self._open: list[tuple[str, float]] = []

    @property
    def total(self) -> float:
        """All of it, in seconds."""
        return sum(self.seconds.values())

    @property
    def made(self) -> float:
        """All of it without what loads files, which is the machine's doing."""
        return self.total - self.seconds.get("imports", 0.0)

    @property
    def elapsed(self) -> float:
        """Seconds since the first call."""
        return marks.clock() - self.began

    def add(self, kind: str, seconds: float) -> None:
        """Notes seconds."""
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds

    def begin(self, kind: str) -> None:
        """From now on; what was under way before is not, until :meth:`end`."""
        self._pause()
        self._open.append((kind, marks.clock()))

    def end(self) -> None:
        """What was begun last is over."""
        self._pause()
        self._open.pop()
        if self._open:
            self._open[-1] = (self._open[-1][0], marks.clock())

    @contextmanager
    def of(self, kind: str) -> Iterator[None]:
        """For what is inside."""
        self.begin(kind)
        try:
            yield
        finally:
            self.end()

    def _pause(self) -> None:
        if self._open:
            kind, since = self._open[-1]
            self.add(kind, marks.clock() - since)

    def __str__(self) -> str:
        parts = [f"{kind} {each:.1f}" for kind, each in self.seconds.items() if each >= 0.05]
        return f"{self.total:.1f} s of {self.elapsed:.0f} s" + (": " + ", ".join(parts)) * bool(
            parts
        )

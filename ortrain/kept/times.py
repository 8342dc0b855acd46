"""What runs of a call take."""

from __future__ import annotations

import time


class Times:
    """What runs take: of the first of a row, behind two in which memory is warmed up.

    Attributes:
        total: seconds of those that were timed.
        count: how many they are.
    """

    MOST, WARM = 50, 2

    __slots__ = ("count", "left", "total")

    def __init__(self) -> None:
        self.total, self.count, self.left = 0.0, 0, self.MOST + self.WARM

    def begin(self) -> float:
        """When a run began; 0 where it is not timed."""
        return time.perf_counter() if self.left else 0.0

    def end(self, since: float) -> None:
        """Adds a run that began then."""
        if since and self.left:
            self.left -= 1
            if self.left < self.MOST:
                self.total += time.perf_counter() - since
                self.count += 1

    @property
    def mean(self) -> float:
        """Seconds of a run; 0 where none was timed."""
        return self.total / self.count if self.count else 0.0

"""Autotuning: who runs a module's steps, by the clock.

The one that runs them meets another, once that is likely to pay: they take turns by steps, each a
real step of the training, and the faster one stays. A turn's first step is not counted, since
memory and caches fill in it.
"""

from __future__ import annotations

from collections import deque
from statistics import median

# A turn lasts until so many of its steps are timed, and either this time or this number is reached.
LEAST, MOST, SECONDS = 3, 50, 0.2
WARM_UP = 1
# Rounds at most, and by how much one has to be ahead for no further one: after one round by twice
# that.
ROUNDS, CLEAR = 3, 0.1
# A challenger below the first share of the fastest step that was seen needs no second look at the
# other: on a cold machine steps were up to 1.7 times as slow as later ones. Below the second it
# needs one step of it more: each would have to be 1.5 times as slow as it is.
SURE, PLAIN = 0.5, 0.65
# It has to be ahead by more than what medians scatter.
MARGIN = 0.98


class Times:
    """Seconds of the last steps of one contestant, by their size, because batches differ in length.

    Attributes:
        counted: those of the turn that is under way, its first step left out.
        sizes: of the last steps.
    """

    def __init__(self) -> None:
        self.counted: list[float] = []
        self.sizes: deque[int] = deque(maxlen=MOST)
        self._skipped = 0

    def add(self, seconds: float, size: int) -> None:
        """Notes a step.

        Args:
            seconds: for each unit of its size.
            size: of it.
        """
        if self._skipped < WARM_UP:
            self._skipped += 1
            return
        self.counted.append(seconds)
        self.sizes.append(size)

    @property
    def step(self) -> float:
        """Seconds of a step of typical size; 0 where none is known."""
        return median(self.counted) * median(self.sizes) if self.counted else 0.0

    @property
    def seconds(self) -> list[float]:
        """Those of each of the last steps."""
        last = self.counted[-len(self.sizes) :]
        return [time * size for time, size in zip(last, self.sizes, strict=True)]

    def enough(self, least: int = LEAST) -> bool:
        """Whether they tell how fast it is, by so many steps or more."""
        count = len(self.counted)
        if count < least:
            return False
        return count >= MOST or sum(self.counted) * median(self.sizes) >= SECONDS


class Duel:
    """Two contestants in turns.

    Args:
        champion: who has run the steps before.
        challenger: who is tried.
        known: of the champion, before.

    Attributes:
        turn: whose it is.
        winner: empty until there is one.
        times: of each contestant, those of all turns.
    """

    def __init__(self, champion: str, challenger: str, known: Times) -> None:
        self.champion, self.challenger = champion, challenger
        self.turn, self.winner = challenger, ""
        self._before = known
        self._now = Times()
        self._ratios: list[float] = []
        self._last = 0.0  # of the challenger
        self.times: dict[str, list[float]] = {champion: [*known.counted], challenger: []}

    def add(self, seconds: float, size: int) -> None:
        """Notes a step of whose turn it is."""
        self._now.add(seconds, size)
        if not self._now.enough() and not self._is_plain():
            return
        done, self._now = self._now, Times()
        self.times[self.turn] += done.counted
        took = median(done.counted)
        if self.turn == self.challenger:
            self._last, self.turn = took, self.champion
            if not self._ratios:
                self._look_early(took)
        else:
            self._ratios.append(self._last / took)
            self._look()
            self.turn = self.challenger

    def _is_plain(self) -> bool:
        """Whether the challenger was faster beyond doubt, in the champion's turn behind it."""
        if self.turn == self.challenger or not self._now.counted:
            return False
        seen = [*self._before.counted, *self.times[self.champion], *self._now.counted]
        return self._last < min(seen) * PLAIN

    def _look_early(self, took: float) -> None:
        known = self._before.counted
        if known and took < min(known) * SURE:
            self.winner = self.challenger
        elif known and took > median(known) * (1 + 2 * CLEAR):
            self.winner = self.champion

    def _look(self) -> None:
        rounds, ratio = len(self._ratios), median(self._ratios)
        clear = CLEAR if rounds > 1 else 2 * CLEAR
        if rounds >= ROUNDS or not 1 - clear < ratio < 1 + clear:
            self.winner = self.challenger if ratio <= MARGIN else self.champion

"""One verdict for all processes that train together: that of the first one's contest.

They wait for each other at every step, so that one with a slower engine would slow all of them
down. Nobody waits for the verdict: until it is there, the others run eagerly.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from torch import distributed

from ortrain.pytorch.processes import store


@dataclass(frozen=True)
class Verdict:
    """What the contest of one form of call has found, in the store of the process group.

    Attributes:
        store: of the group.
        leads: whether this process decides.
        key: of the contest; the same in each process.
    """

    store: Any
    leads: bool
    key: str

    @classmethod
    def of(cls, contest: str) -> Verdict | None:
        """That of a contest; None where no other process trains along.

        Args:
            contest: its name, the same in each process.
        """
        if (shared := store()) is None:
            return None
        return cls(shared, distributed.get_rank() == 0, f"ortrain/contest/{contest}")

    def settled(self, winner: str) -> str:
        """The verdict where there is one yet, else an empty string.

        Args:
            winner: of this process's own contest; empty where it still runs.
        """
        with contextlib.suppress(RuntimeError):  # the store has gone: each for itself
            if not self.leads:
                known = self.store.check([self.key])
                return self.store.get(self.key).decode() if known else ""
            if winner:
                self.store.set(self.key, winner)
        return winner

"""What graphs know of the call of a held module that they run in, and what it hears of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ortrain.passes.tokens import Shown
from ortrain.step.report import Saving


class Call(threading.local):
    """The call that this thread is in.

    Attributes:
        shown: what of its outputs somebody reads.
        ran: graphs that have run as steps in it.
        failed: why the last one that PyTorch ran in its place is none.
        savings: of its graphs that may leave tokens out; None of those that are too small.
        given: its graphs, each with what it has returned.
    """

    shown: Shown = "all"
    ran: int = 0
    failed: Exception | None = None
    savings: tuple[Saving | None, ...] = ()
    given: tuple[tuple[Any, Any], ...] = ()

    @contextmanager
    def of(self, shown: Shown) -> Iterator[None]:
        """A call begins, of whose outputs somebody reads so much."""
        before = vars(self).copy()
        self.shown, self.ran, self.failed, self.savings, self.given = shown, 0, None, (), ()
        try:
            yield
        finally:
            vars(self).clear()
            vars(self).update(before)

    def note(self, saving: Saving | None) -> None:
        """Notes what one of its graphs leaves out."""
        self.savings += (saving,)


CALL = Call()

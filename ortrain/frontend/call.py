"""What graphs know of the call of a held module that they run in, and what it hears of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ortrain.errors import OrtrainError
from ortrain.passes.tokens import Shown
from ortrain.step.report import Saving


class Heard:
    """A call of a held module.

    Args:
        shown: what of its outputs somebody reads.

    Attributes:
        ran: its graphs that have run as steps, each with what it has returned.
        failed: why the last one that PyTorch ran in its place is none.
        savings: of those that may leave tokens out; None of those that are too small.
    """

    def __init__(self, shown: Shown) -> None:
        self.shown = shown
        self.ran: list[tuple[Any, Any]] = []
        self.failed: OrtrainError | None = None
        self.savings: list[Saving | None] = []


class _Here(threading.local):
    call: Heard | None = None


_here = _Here()


def heard() -> Heard | None:
    """The call of a held module that this thread is in; None where it is in none."""
    return _here.call


@contextmanager
def hearing(shown: Shown) -> Iterator[Heard]:
    """A call of a held module is inside."""
    before, _here.call = _here.call, Heard(shown)
    try:
        yield _here.call
    finally:
        _here.call = before

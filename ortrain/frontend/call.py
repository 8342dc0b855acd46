"""What graphs know of the call of a held module that they run in, and what it hears of them."""

from __future__ import annotations

import threading

from ortrain.passes.tokens import Shown


class Call(threading.local):
    """The call that this thread is in.

    Attributes:
        shown: what of its outputs somebody reads.
        ran: graphs that have run as steps in it.
        failed: why the last one that PyTorch ran in its place is none.
    """

    shown: Shown = "all"
    ran: int = 0
    failed: Exception | None = None


CALL = Call()

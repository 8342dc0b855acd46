"""Lines on standard error: while something takes long, and who of several processes prints any."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Iterator

from torch import distributed

# Seconds until the first line; each further one comes after twice the time of the one before.
FIRST = 5.0


def speaks() -> bool:
    """Whether this process is the one that prints: the only one, or the first of a group."""
    grouped = distributed.is_available() and distributed.is_initialized()
    return not grouped or distributed.get_rank() == 0


@contextlib.contextmanager
def progress(doing: str, *, shown: bool) -> Iterator[None]:
    """Says what takes so long: ``ortrain: capturing Classifier … 5 s``.

    Args:
        doing: what the code inside does.
        shown: whether to say anything, where this process does.
    """
    if not (shown and speaks()):
        yield
        return
    done, stream, start = threading.Event(), sys.stderr, time.monotonic()

    def tell() -> None:
        for doubled in itertools.count():
            if done.wait(max(0.0, start + FIRST * 2**doubled - time.monotonic())):
                return
            print(f"ortrain: {doing} … {FIRST * 2**doubled:.0f} s", file=stream, flush=True)

    thread = threading.Thread(target=tell, name="ortrain progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()

"""Stretches without cyclic garbage collection."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No cyclic garbage collection while objects are made by the million and few are dropped.

    Collecting among them costs 0.5 s of the 2.8 s of processor time in which ``ORTModule`` is
    loaded beside torch, 0.2 to 0.9 s of a capture, 0.7 s of a build.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """As :func:`uncollected`, for what will be kept: what is left counts as old afterwards.

    A hundred thousand young objects make Python walk over all objects of the process, which takes
    0.4 s. It is for rare work: garbage of the caller's that is young counts as old, too.
    """
    with uncollected():
        yield
    if gc.isenabled() and not gc.get_freeze_count():  # what the user has frozen stays frozen
        gc.collect(0)
        gc.freeze()
        gc.unfreeze()

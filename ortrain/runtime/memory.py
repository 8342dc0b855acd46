"""Memory that one engine leaves behind, given back before the other one takes its own."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any


def release_free_memory() -> None:
    """Asks the C library to return free heap memory to the system, where it knows how to."""
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # a C library other than glibc
        return None

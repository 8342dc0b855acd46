"""Memory that one engine leaves behind, given back; and pages that a step keeps for the next one.

glibc takes large blocks from the operating system one by one and gives each back when it is freed.
The next step has to fault in, and the kernel to zero, every page anew: of eight gradients of 9.4 MB
that took 15 of 20 ms, and 24 of 29 ms of the zeros of a table of 94 MB. Taken from the heap, whose
end stays where it is, their pages are there.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Iterator
from typing import Any

# Of mallopt. The heap may keep 2 GiB at its end; blocks of up to 32 MiB, the most that glibc takes,
# come from it anyway, as they do in a process that has freed one of that size.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_KEPT, _LARGE, _GIVEN_BACK, _MAPPED = 2**31 - 1, 32 << 20, 4 << 20, 65536


def release_free_memory() -> None:
    """Asks the C library to return free heap memory to the system, where it knows how to."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


@contextlib.contextmanager
def from_the_heap() -> Iterator[None]:
    """What is allocated inside comes from the heap, whose pages stay; 1 us."""
    option = _option()
    if option is None:
        yield
        return
    option(_MMAP_MAX, 0)
    try:
        yield
    finally:
        option(_MMAP_MAX, _MAPPED)


@contextlib.contextmanager
def given_back() -> Iterator[None]:
    """What is allocated inside goes back to the system once it is freed, from 4 MiB on; 1 us.

    A heap whose end stays has holes: a step of BERT-base on 8 texts of 512 tokens with 2.6 GiB of
    tensors takes 3.8 GiB, and so 2.6; its pages are fresh each time, which takes 0.4 of the time.
    """
    option = _option()
    if option is None:
        yield
        return
    option(_MMAP_THRESHOLD, _GIVEN_BACK)
    try:
        yield
    finally:
        option(_MMAP_THRESHOLD, _LARGE)


@functools.cache
def _option() -> Any:
    """``mallopt``, after the heap was told to keep its pages; None for another C library."""
    option = _function("mallopt")
    if option is not None:
        option(_MMAP_THRESHOLD, _LARGE)
        option(_TRIM_THRESHOLD, _KEPT)
    return option


@functools.cache
def _function(name: str) -> Any:
    if not sys.platform.startswith("linux"):
        return None
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  (others have the names, and do nothing)
        return getattr(library, name)
    except (OSError, AttributeError):  # a C library other than glibc
        return None

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
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

# Of mallopt. The heap may keep 2 GiB at its end; blocks of up to 32 MiB, the most that glibc takes,
# come from it anyway, as they do in a process that has freed one of that size.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_KEPT, _LARGE, _GIVEN_BACK, _MAPPED = 2**31 - 1, 32 << 20, 1 << 20, 65536

# What one run may leave free in the heap for the next, in bytes. Capture and certificate of a step
# on 2 texts of 512 tokens left 750 MB in holes, which it did not fill: it took 1048 MiB, and 916
# without them.
HOLES = 64 << 20

# A process may take so many times what it has taken before holes go back again.
RISE = 1.02

# What engines keep beside the heap of the C library, by name; each gives it back when called.
POOLS: dict[str, Callable[[], None]] = {}


def release_pools(beyond: int = 0) -> None:
    """Gives back all that is free of what engines keep, and of the heap.

    Args:
        beyond: bytes that the heap may keep.
    """
    for release in POOLS.values():
        release()
    release_free_memory(beyond)


def release_free_memory(beyond: int = 0) -> None:
    """Asks the C library to return free heap memory to the system, where it knows how to.

    Args:
        beyond: bytes that the heap may keep; up to so many are left where they are.
    """
    trim = _function("malloc_trim")
    if trim is not None and (not beyond or _is_hollow(beyond)):
        trim(0)


def _is_hollow(beyond: int) -> bool:
    """Whether more bytes of the heap are free."""
    return _function("mallinfo2") is not None and int(_info().fordblks) > beyond


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
    """What is allocated inside goes back to the system once it is freed, from 1 MiB on; 1 us.

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


class Ceiling:
    """Has a process take little more than its tensors, while a step runs from the heap.

    What is freed leaves holes in the heap, and small blocks that are made meanwhile cut them into
    pieces, in which the next large tensor finds no room: a step of BERT-base on 8 texts of 512
    tokens that holds 1.3 GiB took 3.0. Once the process is about to take more than the step should
    hold, holes go back to the system, all of them in 50 ms.

    Without a limit, holes go back once the process takes more than it ever has, as in PyTorch's
    steps before, and again with each 2 % more: a step that needs more is soon left alone.

    Attributes:
        limit: bytes that a step should hold beyond what was there before it; 0 where nobody has
            said. A step that holds more raises it.
        margin: bytes of its largest tensor.
    """

    def __init__(self) -> None:
        self.limit = self.margin = 0
        self._line = 0.0
        self._before = 0
        self._elsewhere: int | None = None

    @staticmethod
    def serves() -> bool:
        """Whether this C library gives holes back, and says how much is in use."""
        return _function("malloc_trim") is not None and _function("mallinfo2") is not None

    def begin(self) -> None:
        """A step begins: what is in use now is not of it."""
        if not self.limit:
            self._line = max(self._line, most_resident())
            return
        if self._elsewhere is None:
            self._close()
        self._before = (self._elsewhere or 0) + in_use()
        self._line = self._before + self.limit - self.margin

    def __call__(self) -> None:
        """Looks how much the process takes; 2 us."""
        now = resident()
        if now <= self._line:
            return
        if not self.limit:
            release_free_memory()
            self._line = RISE * now
        else:
            found = self._close()
            self.limit = max(self.limit, found - self._before)
            least = self._before + self.limit - self.margin
            self._line = max(least, found + self.margin / 2)

    def _close(self) -> int:
        """Gives holes back; what the process takes then is in use, or not of the heap."""
        release_free_memory()
        found = resident()
        self._elsewhere = found - in_use()
        return found


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def in_use() -> int:
    """Bytes of all blocks that are not free: what a process takes but for holes.

    Only where `Ceiling.serves`.
    """
    info = _info()
    return int(info.uordblks + info.hblkhd)


def _info() -> Any:
    function = _function("mallinfo2")
    function.restype = _MallInfo
    return function()


def resident() -> int:
    """Bytes that the process takes.

    Raises:
        OSError: the operating system is another than Linux.
    """
    return int(os.pread(_file("statm", os.getpid()), 64, 0).split(None, 2)[1]) * mmap.PAGESIZE


def most_resident() -> int:
    """Bytes that the process has taken at most; 0 where nobody tells. 8 us.

    Raises:
        OSError: the operating system is another than Linux.
    """
    told = os.pread(_file("status", os.getpid()), 4096, 0).partition(b"VmHWM:")[2]
    return int(told.split(None, 1)[0]) << 10 if told else 0


@functools.cache
def _file(name: str, process: int) -> int:
    """An open file that tells of this process; one that was forked has its own."""
    return os.open(f"/proc/self/{name}", os.O_RDONLY | os.O_CLOEXEC)


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

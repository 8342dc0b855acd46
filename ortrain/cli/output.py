"""Standard output, for what the commands say: libraries that write there write to stderr."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def libraries_to_stderr() -> Iterator[TextIO]:
    """What is printed inside goes to stderr, as the log of DeepSpeed where it is imported.

    Yields:
        Standard output, for the command's own words.
    """
    own = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        yield own


@contextmanager
def descriptor_to_stderr() -> Iterator[None]:
    """What is written inside to file descriptor 1, as by C++, goes to stderr.

    ``sys.stdout`` goes where it went before. Where it is not that descriptor, nothing changes.
    """
    original = sys.stdout
    try:
        served = original.fileno() == 1
        kept = os.dup(1) if served else -1
    except (AttributeError, OSError, ValueError):  # none, closed, or a stream of a test's
        served = False
    if not served:
        yield
        return
    original.flush()
    own = open(  # noqa: SIM115, PTH123 - a descriptor, closed below
        kept,
        "w",
        encoding=original.encoding,
        errors=original.errors,
    )
    own.reconfigure(
        line_buffering=getattr(original, "line_buffering", False),
        write_through=getattr(original, "write_through", False),
    )
    try:
        with contextlib.suppress(OSError):  # without a stderr
            os.dup2(2, 1)
        sys.stdout = own
        yield
    finally:
        sys.stdout = original
        with contextlib.suppress(OSError, ValueError):  # what Python keeps of what it was given
            original.flush()
        with contextlib.suppress(OSError, AttributeError):  # what C keeps for a pipe until the end
            ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        with contextlib.suppress(OSError):  # what could not be written has been told
            own.close()

"""Errors of a graph whose call PyTorch answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ortrain.capture.origin import is_own, own_failure
from ortrain.errors import ExecutionError


@contextmanager
def alone(error: BaseException) -> Iterator[None]:
    """Errors raised inside are shown without ``error``, which is being handled around them."""
    try:
        yield
    except Exception as raised:
        shown: BaseException | None = raised
        while shown is not None and shown.__context__ is not error:
            shown = shown.__context__
        if shown is not None:
            shown.__context__ = None
        raise


def unforeseen(error: Exception) -> ExecutionError:
    """An error that nobody foresaw, as one that has a fallback."""
    if is_own(error):
        failure = ExecutionError(**own_failure(error, "running the graph"))
    else:  # of a call in the graph that stays PyTorch's
        failure = ExecutionError(
            "the graph failed to run",
            because=f"{type(error).__name__}: {error}",
            help="please report it; the call runs in PyTorch instead",
        )
    failure.__cause__ = error
    return failure

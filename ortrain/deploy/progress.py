"""How far long loops are, with the time left, for who asks to see it: the commands do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

_Item = TypeVar("_Item")

_is_shown: ContextVar[bool] = ContextVar("progress", default=False)


@contextmanager
def shown() -> Iterator[None]:
    """Inside, loops are shown on standard error where that is a terminal and tqdm is installed.

    It comes with the extra ``onnx``; without it nothing is shown.
    """
    token = _is_shown.set(True)
    try:
        yield
    finally:
        _is_shown.reset(token)


def tracked(
    items: Iterable[_Item], what: str, unit: str, total: int | None = None
) -> Iterable[_Item]:
    """The items, with a line that tells how many are done and how long the others will take.

    Args:
        items: of a loop.
        what: is done with them: ``"comparing"``.
        unit: what one of them is.
        total: how many there are, where they have no length.
    """
    if not _is_shown.get():
        return items
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    # disable=None: on a terminal alone.
    return tqdm(items, what, total, leave=False, dynamic_ncols=True, unit=unit, disable=None)

"""What dictionaries, lists and sets hold, put back for a while."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any

from ortrain.module_state.value import elements, entries

_KINDS = (OrderedDict, dict, list, deque, set, bytearray)


@contextlib.contextmanager
def contents(wanted: Iterable[tuple[Any, Any]]) -> Iterator[None]:
    """Each container holds for a while what it is given with, and then again what it held.

    Args:
        wanted: dictionaries, lists, deques, sets or byte arrays, each with a copy of what
            it is to hold.
    """
    with contextlib.ExitStack() as stack:
        for container, held in wanted:
            if not _holds(container, held):
                stack.callback(_filled, container, _copied(container))
                _filled(container, held)
        yield


@contextlib.contextmanager
def unchanged(containers: Iterable[Any]) -> Iterator[None]:
    """Each container holds afterwards what it holds now."""
    before = [(container, _copied(container)) for container in containers]
    try:
        yield
    finally:
        for container, held in before:
            if not _holds(container, held):
                _filled(container, held)


def _copied(container: Any) -> Any:
    if isinstance(container, bytearray):
        return [*container]
    return dict(entries(container)) if isinstance(container, dict) else elements(container)


def _holds(container: Any, held: Any) -> bool:
    """Whether a container holds these very objects, in this order."""
    now = _copied(container)
    if len(now) != len(held):
        return False
    if isinstance(container, dict):
        if not all(map(_same_key, now, held)):
            return False
        now, held = now.values(), held.values()
    return all(map(is_, now, held))


def _same_key(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and one == other)


def _filled(container: Any, held: Any) -> None:
    # Not the container's own methods: a Counter's adds, and a subclass may do anything.
    kind: Any = next(each for each in _KINDS if isinstance(container, each))
    if isinstance(container, dict) and dict.keys(container) == held.keys():
        kind.update(container, held)  # so that nobody finds it empty meanwhile
        if all(map(_same_key, _copied(container), held)):
            return
    kind.clear(container)
    add = kind.update if hasattr(kind, "update") else kind.extend
    add(container, held)

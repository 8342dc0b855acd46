"""Which attributes of modules code reads: what none has read need not be watched.

Scripts keep their books on the module: losses of the steps so far, the card of the model, when it
was saved. Each entry would be another state of it, with a capture of its own. A trace shows that no
code reads them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator
from typing import Any

from ortrain.guards.attributes import Attribute

# Python's own ways to all that an object holds: as a dictionary, or for a copy.
_WHOLE = {"__dict__", "__getstate__", "__reduce__", "__reduce_ex__"}


@contextlib.contextmanager
def reads_noted(attributes: Collection[Attribute]) -> Iterator[set[Attribute]]:
    """Notes which of some attributes are read inside, of these modules or of others of their class.

    For that time their classes have another ``__getattribute__``; of one that has its own, all were
    read. Who reads ``__dict__`` as a whole has read all, but for torch and this package.

    Yields:
        Those that were read until now.
    """
    found: set[Attribute] = set()
    wanted: dict[type, dict[str, set[Attribute]]] = {}
    for each in attributes:
        if _has_its_own(type(each.owner)):
            found.add(each)
        named = wanted.setdefault(type(each.owner), {})
        named.setdefault(each.name, set()).add(each)
    kinds = {kind for kind in wanted if not _has_its_own(kind)}
    for kind in kinds:
        kind.__getattribute__ = _noting(wanted[kind], found)  # type: ignore[method-assign]
    try:
        yield found
    finally:
        for kind in kinds:
            del kind.__getattribute__


def _noting(named: dict[str, set[Attribute]], found: set[Attribute]) -> Any:
    def get(self: Any, name: str) -> Any:
        if name in named:
            found.update(named[name])
        elif name in _WHOLE:
            reader = sys._getframe(1).f_globals.get("__name__") or ""
            if reader.partition(".")[0] not in ("torch", "ortrain"):
                found.update(*named.values())
        return object.__getattribute__(self, name)

    return get


def _has_its_own(kind: Any) -> bool:
    return kind.__getattribute__ is not object.__getattribute__

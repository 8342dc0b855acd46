"""What a proof about a call's code takes for granted, looked at again before it is relied on.

Python lets anybody put another function or number under a name. What was proved of code is true of
what stood under the names that it reads, and of no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NOTHING = object()


class Premises:
    """Names, each with what stood under it."""

    def __init__(self) -> None:
        self._items: list[tuple[Mapping[str, Any], str, Any]] = []
        self._attributes: list[tuple[Any, str, Any]] = []

    def item(self, mapping: Mapping[str, Any], name: str) -> Any:
        """Takes what a mapping has under a name for granted, and returns it; None for nothing."""
        found = mapping.get(name, _NOTHING)
        self._items.append((mapping, name, found))
        return None if found is _NOTHING else found

    def attribute(self, owner: Any, name: str) -> Any:
        """Takes an attribute for granted, and returns it."""
        found = getattr(owner, name, _NOTHING)
        self._attributes.append((owner, name, found))
        return None if found is _NOTHING else found

    def hold(self) -> bool:
        """Whether all is as it was: the same objects, which are themselves never changed."""
        return all(
            mapping.get(name, _NOTHING) is was for mapping, name, was in self._items
        ) and all(getattr(owner, name, _NOTHING) is was for owner, name, was in self._attributes)

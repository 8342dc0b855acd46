"""What a model takes and its answer does not depend on, as its file says it: no input has it.

A mask that a model's code never looks at may then be given to the file all the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

_KEY = "ortrain.unread"


def note(metadata: dict[str, str], names: Sequence[str]) -> None:
    """Puts names of arguments into a file's metadata."""
    if names:
        metadata[_KEY] = json.dumps(list(names))


def noted(metadata: Mapping[str, str]) -> frozenset[str]:
    """The names that a file's metadata has; none where another tool has written it."""
    try:
        found = json.loads(metadata.get(_KEY, "[]"))
    except ValueError:
        return frozenset()
    return frozenset(map(str, found)) if isinstance(found, list) else frozenset()

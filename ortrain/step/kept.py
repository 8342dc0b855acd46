"""What of a module stays PyTorch's in its graphs: asked for by name, or found to be without one."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence

from torch import nn

from ortrain.errors import InputError

# Sub-modules whose code a capture refuses that may stay PyTorch's, before the whole does.
MOST_REFUSED = 8
ASKED = "keep_in_torch names it"


def named_modules(module: nn.Module, patterns: Sequence[str]) -> dict[str, str]:
    """The sub-modules that patterns match, each with the reason why it stays; the outermost alone.

    Args:
        module: that they are in.
        patterns: names as of ``named_modules()``, in which ``*``, ``?`` and ``[…]`` stand for others.

    Raises:
        InputError: a pattern matches none.
    """
    names = [name for name, _ in module.named_modules() if name]
    found: set[str] = set()
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            near = difflib.get_close_matches(pattern, names, 3, 0.0)
            raise InputError(
                f"keep_in_torch={pattern!r} is no sub-module of {type(module).__name__}",
                because=f"the nearest are {', '.join(map(repr, near))}"
                if near
                else "it has no sub-modules",
                help="take a name of named_modules(), or a pattern such as '*.router'",
            )
        found.update(matching)
    return dict.fromkeys(outermost(found, names), ASKED)


def outermost(wanted: set[str], names: Sequence[str]) -> list[str]:
    """Of some names those that are inside of no other, in the order of all names."""

    def around(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:i]) in wanted for i in range(1, len(parts)))

    return [name for name in names if name in wanted and not around(name)]

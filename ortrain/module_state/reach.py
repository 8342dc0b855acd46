"""What the bytecode of a function names: what it may read or write beyond its arguments.

Only the code can tell which of the globals around a module belong to its state. All of it is an
upper bound: what stands behind a branch that is never taken counts as well.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from types import CodeType

_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"}
# So begin the names of what pytest writes into the assertions of tests, which runs where one fails,
# and which holds the whole session, clocks included. No source has such a name.
_REWRITTEN = "@"


@functools.lru_cache(maxsize=8192)
def names(code: CodeType) -> frozenset[str]:
    """Attributes, globals and free variables, and strings that may be names, for ``getattr``.

    Those of the functions inside it are among them. 2 us a function.
    """
    found = set[str]()
    for each in _codes(code):
        found.update(each.co_names, each.co_freevars)
        found.update(c for c in each.co_consts if isinstance(c, str) and c.isidentifier())
    return frozenset(found)


@functools.lru_cache(maxsize=8192)
def global_names(code: CodeType) -> frozenset[tuple[str, str]]:
    """Globals, each with the attribute that is taken of it right there, or an empty string.

    ``settings.scale`` is ``("settings", "scale")``. What pytest adds to assertions is left out.
    1 ms for a forward of twenty lines, once a process.
    """
    found = set[tuple[str, str]]()
    for each in _codes(code):
        name = ""
        for step in dis.get_instructions(each):
            if name:
                found.add((name, str(step.argval) if step.opname in _ATTRIBUTES else ""))
            name = str(step.argval) if step.opname in _GLOBALS else ""
        if name:
            found.add((name, ""))
    return frozenset(pair for pair in found if not pair[0].startswith(_REWRITTEN))


def asks_class(code: CodeType) -> bool:
    """Whether code calls ``type``, or reads a ``__class__`` by name."""
    called = any(name == "type" for name, _ in global_names(code))
    return called or any("__class__" in each.co_names for each in _codes(code))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)

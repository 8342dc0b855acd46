"""What kind an argument has to be: a wrong one is told by name, before anything else happens."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Collection, Mapping
from numbers import Integral, Real
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 60, 60
_PLAIN = (str, bytes, int, float, bool, list, tuple, dict, set, type(None))


def shown(value: object) -> str:
    """A value in an error message, where a whole module or tensor would bury the rest."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return _SHORT.repr(value) if type(value) in _PLAIN else f"{type(value).__name__}(…)"


def refused(name: str, value: object, expected: str, hint: str = "") -> TypeError:
    """The error of an argument of another kind.

    Args:
        name: of the argument.
        value: what was given.
        expected: what is.
        hint: the way out, where the value shows it.
    """
    return TypeError(f"{name}={shown(value)}: expected {expected}" + (f"; {hint}" if hint else ""))


def expect(
    name: str, value: object, kinds: type | tuple[type, ...], expected: str, hint: str = ""
) -> None:
    """Raises TypeError where an argument is of none of the kinds.

    A bool is a number only where ``bool`` is among them.

    Args:
        name: of the argument.
        value: what was given.
        kinds: its classes.
        expected: these in words.
        hint: the way out, where the value shows it.
    """
    given = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, given) or (type(value) is bool and not {bool, object} & {*given}):
        raise refused(name, value, expected, hint)


def expect_flag(name: str, value: object) -> None:
    """Raises TypeError where an argument is not True or False, which old scripts write 1 or 0."""
    if type(value) is not bool and not (isinstance(value, Integral) and int(value) in (0, 1)):
        raise refused(name, value, "True or False")


def expect_number(name: str, value: object, *others: type, expected: str = "a number") -> None:
    """Raises TypeError where an argument is no real number, and of none of the other classes."""
    expect(name, value, (Real, *others), expected)


def expect_whole(name: str, value: object, *others: type, expected: str = "a whole number") -> None:
    """Raises TypeError where an argument is no whole number, and of none of the other classes."""
    expect(name, value, (Integral, *others), expected)


def expect_pair(name: str, value: Any) -> None:
    """Raises TypeError where an argument is no pair of numbers."""
    if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
        raise refused(name, value, "a pair of numbers")
    if len(value) != 2 or not all(isinstance(v, Real) for v in value):
        raise refused(name, value, "a pair of numbers")


def expect_path(name: str, value: object, *others: type, expected: str = "a path") -> None:
    """Raises TypeError where an argument is no path, and of none of the other classes."""
    expect(name, value, (str, os.PathLike, *others), expected)


def expect_names(name: str, value: Any, *others: type) -> None:
    """Raises TypeError where an argument is no collection of strings; a string is none."""
    if isinstance(value, others):
        return
    hint = f"write {name}=[{shown(value)}]" if isinstance(value, str) else ""
    if not isinstance(value, Collection) or isinstance(value, str | bytes):
        raise refused(name, value, "a list of names", hint)
    for each in value:
        if not isinstance(each, str):
            raise refused(name, value, "a list of names")


NONE = type(None)

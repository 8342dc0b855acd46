"""Objects among arguments and outputs that are all in their attributes: dataclasses and the like.

An object of a script's own class counts where it holds tensors; what else it holds has to be made
of tensors and constants too. Records are made anew without their constructors.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict
from types import FunctionType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from ortrain.guards.key_value_cache import is_cache
from ortrain.module_state.holder import slots_of
from ortrain.module_state.scope import is_constant, is_library
from ortrain.module_state.value import own_attributes

# Classes with another may take arguments there.
_NEW: tuple[Any, ...] = (object.__new__, SimpleNamespace.__new__)


def attributes_of(value: Any) -> tuple[str, ...] | None:
    """The names of what a record holds; None of what is none."""
    if isinstance(value, (type, FunctionType)):
        return None
    held = own_attributes(value)
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value)]
        names = dict.fromkeys([*fields, *(held or ())])  # whatever else was set belongs to it too
        return tuple([name for name in names if hasattr(value, name)])
    if held is None or not _is_plain(value):
        return None
    try:
        return tuple(held) if _holds_tensors(value, ()) else None
    except _InItself:
        return None


class _InItself(Exception):
    """A value is in what it holds; no user ever sees this."""


def classes_of(value: Any) -> set[type]:
    """The classes of a script's own among the records and containers in a value."""
    if isinstance(value, dict | UserDict):
        children = list(value.values())
    elif isinstance(value, list | tuple):
        children = list(value)
    else:
        children = [getattr(value, name) for name in attributes_of(value) or ()]
    kind = type(value)
    known = is_library(kind.__module__) or not (children or isinstance(value, dict | list | tuple))
    return set().union(() if known else {kind}, *map(classes_of, children))


def new(kind: type) -> Any:
    """A record of a class with nothing in it, made without its constructor."""
    make = SimpleNamespace.__new__ if issubclass(kind, SimpleNamespace) else object.__new__
    return make(kind)


def _is_plain(value: Any) -> bool:
    """Whether an object is of a class whose state is its attributes, as far as can be told."""
    return not (
        isinstance(value, Tensor | nn.Module | UserDict | dict | list | tuple)
        or is_constant(value)
        or is_cache(value)
        or slots_of(type(value))
        or type(value).__new__ not in _NEW
    )


def _holds_tensors(value: Any, around: tuple[int, ...]) -> bool:
    """Whether tensors are in a value, at any depth.

    Args:
        value: any.
        around: ids of what it is in.
    """
    if id(value) in around:
        raise _InItself
    if isinstance(value, Tensor):
        return True
    if isinstance(value, dict | UserDict):
        children = list(value.values())
    elif isinstance(value, list | tuple):
        children = list(value)
    elif (held := own_attributes(value)) is not None and (
        dataclasses.is_dataclass(value) or _is_plain(value)
    ):
        children = list(held.values())
    else:
        return False
    found = False
    for child in children:
        found |= _holds_tensors(child, (*around, id(value)))
    return found

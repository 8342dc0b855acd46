"""Equality that tells apart whatever a forward could: 1 from 1.0 and True, 0.0 from -0.0."""

from __future__ import annotations

import datetime as dt
import re
import reprlib
from collections import OrderedDict, deque
from collections.abc import Hashable
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from types import BuiltinFunctionType, EllipsisType, FunctionType, MethodType
from typing import Any
from uuid import UUID

import numpy as np
import torch

SCALARS = (
    type(None),
    int,
    str,
    bytes,
    Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    np.dtype,
    range,
    re.Pattern,
    dt.date,
    dt.time,
    dt.timedelta,
    dt.tzinfo,
    Fraction,
    PurePath,
    UUID,
    EllipsisType,
)
SEQUENCES = (tuple, list, set, frozenset, deque)

MIXED = object()  # not a scalar, nor a container of nothing but scalars
ABSENT = object()  # no value at all


def frozen(value: Any, levels: int = 6) -> Hashable:
    """A copy of a scalar, or of a container of scalars, that is equal only to the very same value.

    Args:
        value: anything.
        levels: how far to look into containers, some of which contain themselves.

    Returns:
        A hashable in which ``1``, ``1.0`` and ``True`` differ and a NaN equals itself; `MIXED` for
        anything that holds anything else.
    """
    kind = type(value)
    if isinstance(value, float):
        return kind, float.hex(value)
    if isinstance(value, SCALARS):
        return kind, plain_scalar(value)
    if isinstance(value, complex):
        return kind, value.real.hex(), value.imag.hex()
    if isinstance(value, np.generic):
        return (kind, value.tobytes()) if value.dtype.kind in "biufcSUmM" else MIXED
    if isinstance(value, bytearray):
        return kind, bytes(value)
    if isinstance(value, Decimal):
        return kind, str(value)
    if levels == 0:
        return MIXED
    if isinstance(value, dict):
        parts = [frozen(part, levels - 1) for item in entries(value) for part in item]
    elif isinstance(value, SEQUENCES):
        parts = [frozen(part, levels - 1) for part in elements(value)]
    elif isinstance(value, slice):
        parts = [frozen(part, levels - 1) for part in (value.start, value.stop, value.step)]
    else:
        return MIXED
    if any(part is MIXED for part in parts):
        return MIXED
    return kind, frozenset(parts) if isinstance(value, set | frozenset) else tuple(parts)


def plain_scalar(value: Any) -> Any:
    """A number or string of a class of the user's, which may compare as it likes, as Python's."""
    kind = type(value)
    if kind is int or kind is str or isinstance(value, Enum):
        return value
    if isinstance(value, int):
        return int.__index__(value)
    return str.__str__(value) if isinstance(value, str) else value


def own_attributes(value: Any) -> dict[str, Any] | None:
    """The ``__dict__`` of an object, whatever its class answers; None where it has none."""
    try:
        held = getattr(value, "__dict__", None)
    except Exception:  # a property of that name, or __getattr__, may raise anything
        return None
    return held if isinstance(held, dict) else None


def elements(value: Any) -> list[Any]:
    """What a sequence or set holds, whatever its class makes of loops and lengths."""
    kind: Any = next(each for each in SEQUENCES if isinstance(value, each))
    return [*kind.__iter__(value)]


def dict_kind(value: dict[Any, Any]) -> Any:
    """The class whose methods reach what a dictionary holds, whatever its own makes of them."""
    return OrderedDict if isinstance(value, OrderedDict) else dict


def entries(value: Any) -> list[tuple[Any, Any]]:
    """What a dictionary holds, likewise."""
    if not isinstance(value, dict):
        return [*value.items()]
    try:
        return [*dict_kind(value).items(value)]
    except TypeError:  # an OrderedDict asks each key for its hash; sizes of a trace have none
        return [*dict.items(value)]


def same(one: Any, other: Any) -> bool:
    """Whether a forward could not tell two values apart; tensors and objects by identity."""
    if one is other:
        return True
    if type(one) is not type(other) or one is ABSENT:
        return False
    if isinstance(one, MethodType):
        return bool(one == other)
    value = frozen(one)
    return value is not MIXED and value == frozen(other)


class _Kinds(reprlib.Repr):
    """The text of a container, with the classes of the objects in it in place of their contents.

    A tensor would have to be read for its text, and an object's own may be long, or raise.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 30
        self.maxdeque = self.maxstring = self.maxlong = self.maxother = 60

    def repr_instance(self, x: Any, level: int) -> str:
        """Of what is no container, number or string of Python's own."""
        plain = isinstance(x, (float, complex, *SCALARS))
        return repr(x) if plain else f"a {type(x).__qualname__}"


_KINDS = _Kinds()


def short(value: Any) -> str:
    """A value for a sentence: in full where it is short, else its beginning or its type."""
    if isinstance(value, (float, complex, *SCALARS, *SEQUENCES, dict)):
        try:
            text = _KINDS.repr(value) if frozen(value) is MIXED else repr(value)
        except Exception:  # of a class of the user's
            return f"a {type(value).__qualname__}"
        return text if len(text) <= 60 else f"{text[:57]}..."
    if isinstance(value, BuiltinFunctionType):
        return value.__name__  # torch.relu calls itself _VariableFunctionsClass.relu in full
    name = value.__qualname__ if isinstance(value, type | FunctionType | MethodType) else None
    return name or f"a {type(value).__qualname__}"

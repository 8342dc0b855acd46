"""Types of arguments that commands share: what they accept, and what they say of anything else."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import inf
from typing import TypeVar

_Number = TypeVar("_Number", int, float)


def _number(
    convert: Callable[[str], _Number], accepts: Callable[[_Number], bool], wanted: str
) -> Callable[[str], _Number]:
    def parse(text: str) -> _Number:
        try:
            value = convert(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is not {wanted}") from None
        if not accepts(value):
            raise argparse.ArgumentTypeError(f"'{text}' is not {wanted}")
        return value

    return parse


count = _number(int, lambda value: value >= 1, "a whole number from 1 up")
whole = _number(int, lambda value: value >= 0, "a whole number from 0 up")
seed = _number(int, lambda value: 0 <= value < 2**32, "a whole number from 0 to 4294967295")
positive = _number(float, lambda value: 0 < value < inf, "a number above 0")
not_negative = _number(float, lambda value: 0 <= value < inf, "a number from 0 up")
probability = _number(float, lambda value: 0 <= value < 1, "a probability below 1")


def names(text: str) -> tuple[str, ...]:
    """Names between commas."""
    found = tuple(name.strip() for name in text.split(","))
    if not all(found):
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of names such as text,label")
    return found

"""Tables of which `make test` runs a sample, and `make test-breadth` the rest.

Where each case takes tenths of a second, of a test's cases one in eight runs, one at least
(:func:`beyond`). A test whose cases take seconds says itself which are in the sample.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping
from itertools import product
from typing import Any

import pytest

# Tests that capture, train or differentiate a model in each case.
THINNED = ("autodiff/test_attention.py", "capture", "classic", "cli", "compat", "deploy", "kept",
           "module", "ondevice", "passes", "trainer")  # fmt: skip
LEAST, ONE_IN = 1, 8


def beyond(cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The names of a test's cases that are not in the sample.

    Those come first into the sample that have most values of arguments which none before has; among
    equals a checksum of the name decides, so that a new case leaves the others where they are.

    Args:
        cases: name of a case → value of each argument.
    """
    values = {
        name: {(argument, _key(value)) for argument, value in arguments.items()}
        for name, arguments in cases.items()
    }
    waiting = sorted(cases, key=lambda name: zlib.crc32(name.encode()))
    seen: set[Any] = set()
    for _ in range(min(len(cases), max(LEAST, len(cases) // ONE_IN))):
        chosen = max(waiting, key=lambda name: len(values[name] - seen))
        waiting.remove(chosen)
        seen |= values[chosen]
    return waiting


def _key(value: Any) -> Any:
    """What a value is known by; the tables' own object where it has no hash."""
    try:
        return type(value), hash(value), value
    except TypeError:
        return type(value), id(value)


def sampled(names: Iterable[Any], sample: Collection[Any]) -> list[Any]:
    """The names as parameters, those beyond the sample marked ``breadth``.

    Raises:
        ValueError: the sample names what is not there.
    """
    names = list(names)
    _all_there(sample, names)
    return [n if n in sample else _beyond(n) for n in names]


def crossed(
    *axes: Iterable[Any], one_in: int = 1, sample: Collection[Any] | None = None
) -> list[Any]:
    """Each combination of the axes' values as parameters, of which the sample has one in so many.

    The values take turns: of a sample are the combinations whose positions along the axes add up
    to a multiple of ``one_in``. Where no axis is shorter than that, each value of each is in it;
    of three such axes, or with ``one_in`` half of an axis, so is each pair.

    Args:
        axes: values, along each argument of the test.
        one_in: how many combinations there are to each of the sample.
        sample: values of the first axis, where only those are in it; all by default.

    Raises:
        ValueError: the sample names what is not there.
    """
    first, *others = map(list, axes)
    chosen = first if sample is None else [value for value in first if value in sample]
    _all_there(chosen if sample is None else sample, first)
    turns = {value: number for number, value in enumerate(chosen)}
    found = []
    for places in product(*(range(len(axis)) for axis in (first, *others))):
        values = [axis[i] for axis, i in zip((first, *others), places, strict=True)]
        turn = turns.get(values[0])
        inside = turn is not None and (turn + sum(places[1:])) % one_in == 0
        found.append(pytest.param(*values) if inside else _beyond(*values))
    return found


def table(rows: Iterable[Collection[Any]], *, one_in: int) -> list[Any]:
    """Each row of a table as parameters, of which the sample has one in so many."""
    return [pytest.param(*row) if i % one_in == 0 else _beyond(*row) for i, row in enumerate(rows)]


def _beyond(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.breadth)


def _all_there(sample: Collection[Any], names: Collection[Any]) -> None:
    if unknown := [each for each in sample if each not in names]:
        raise ValueError(f"no such case: {', '.join(sorted(map(str, unknown)))}")

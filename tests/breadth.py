"""Tables of which `make test` runs a sample, and `make test-breadth` all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


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

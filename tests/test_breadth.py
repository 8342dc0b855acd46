"""Which of a test's cases are in the sample of `make test`."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest

from tests.breadth import LEAST, ONE_IN, beyond

AXES = [[*"abcdefgh"], [[1], [2], [3]], [1, True, 1.0, None]]  # lists have no hash


def cases(*axes: list[Any]) -> dict[str, dict[str, Any]]:
    rows = [{str(i): value for i, value in enumerate(row)} for row in product(*axes)]
    return {str(list(row.values())): row for row in rows}


@pytest.mark.parametrize("count", range(1, 40))
def test_one_in_eight_runs_and_one_at_least(count: int) -> None:
    table = {str(i): {"x": i} for i in range(count)}
    left = beyond(table)
    assert len(set(left)) == len(left) == count - min(count, max(LEAST, count // ONE_IN))
    assert set(left) <= set(table)


@pytest.mark.parametrize("shuffle", range(8))
@pytest.mark.parametrize("axes", [AXES, AXES[::-1], [AXES[0][:4], *AXES[1:]]])
def test_each_value_of_each_argument_is_in_the_sample(axes: list[Any], shuffle: int) -> None:
    table = cases(*axes)
    names = random.Random(shuffle).sample([*table], len(table))
    left = {*beyond({name: table[name] for name in names})}
    assert left == {*beyond(table)}, "the order of the cases decides nothing"
    inside = [row for name, row in table.items() if name not in left]
    for i, axis in enumerate(axes):
        shown = {repr(value) for value in axis}
        assert {repr(row[str(i)]) for row in inside} == shown


def test_a_new_case_leaves_most_others_where_they_are() -> None:
    table = {f"case {i}": {"x": i} for i in range(60)}
    before = {*beyond(table)}
    after = {*beyond(table | {"another": {"x": 60}})}
    assert len(before ^ after) <= 2

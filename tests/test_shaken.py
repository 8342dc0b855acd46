"""The order that `make test-shaken` draws, and the sizes that it sets."""

from __future__ import annotations

import importlib
import itertools

import pytest

from tests.shaken import SIZES, shuffled

FILES = ["a", "a", "a", "b", "b", "c", "d", "d", "d", "d"]
TESTS = list(range(len(FILES)))


@pytest.mark.parametrize("seed", range(20))
def test_a_seed_has_one_order_in_which_files_stay_together(seed: int) -> None:
    order = shuffled(TESTS, FILES, seed)
    assert sorted(order) == TESTS
    assert len([*itertools.groupby(order, FILES.__getitem__)]) == len(set(FILES))
    assert order == shuffled(TESTS, FILES, seed)


def test_seeds_differ_in_files_and_in_tests() -> None:
    orders = [shuffled(TESTS, FILES, seed) for seed in range(20)]
    assert len({tuple(dict.fromkeys(FILES[i] for i in order)) for order in orders}) > 5
    assert len({tuple(i for i in order if FILES[i] == "d") for order in orders}) > 5


@pytest.mark.parametrize(("name", "size"), [(n, s) for n, sizes in SIZES.items() for s in sizes])
def test_each_size_is_a_number_of_its_module(name: str, size: str) -> None:
    assert isinstance(getattr(importlib.import_module(name), size), int | float)

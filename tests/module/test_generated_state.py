"""Modules made up at random: what changes in their state, or is changed by their forward."""

from __future__ import annotations

import pytest

from tests.module.generated_state import LEAVES, ROOTS, WRITES, program

pytestmark = pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")


@pytest.mark.parametrize("seed", range(len(ROOTS)))
def test_a_change_between_calls_gives_eagers_result_on_a_graph(seed: int) -> None:
    made = program(seed, writes=False)
    # A graph drops nothing from a deque, and computes nothing with arrays.
    followed = "maxlen" not in made.source and "from_numpy" not in made.source
    assert made.run() == ("graph" if followed else "eager")


@pytest.mark.parametrize("seed", range(len(ROOTS)))
def test_a_forward_that_writes_its_state_writes_what_eager_does(seed: int) -> None:
    program(seed, writes=True).run()


def test_the_sample_has_every_place_and_most_kinds_of_values() -> None:
    titles = [program(seed, writes=False).title for seed in range(len(ROOTS))]
    assert all(any(f", {root}, " in title for title in titles) for root in ROOTS)
    used = [leaf for leaf, change, _ in LEAVES if any(change in title for title in titles)]
    assert len(used) > len(LEAVES) / 2
    assert len(WRITES) > 10

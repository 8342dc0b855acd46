"""Balanced samplers: every sample once, processes with like work, the same order in all of them."""

from __future__ import annotations

import random
from itertools import product

import pytest

from ortrain.data import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

GRID = list(
    product((8, 13, 40), (1, 2, 3, 4), (True, False), (None, 3, 50), (True, False), (0, 0.5, 1.0))
)
CASES = GRID[:: max(1, len(GRID) // 60)]


def samplers(
    count: int, world: int, **settings: object
) -> tuple[list[int], list[LoadBalancingDistributedSampler]]:
    lengths = [random.randrange(1, 1000) for _ in range(count)]
    made = [
        LoadBalancingDistributedSampler(
            lengths, lambda length: length, world_size=world, rank=rank, **settings
        )
        for rank in range(world)
    ]
    return lengths, made


@pytest.mark.parametrize(("count", "world", "shuffle", "group", "drop", "level"), CASES)
def test_processes_share_the_samples(
    count: int, world: int, shuffle: bool, group: int | None, drop: bool, level: float
) -> None:
    _, made = samplers(
        count, world, shuffle=shuffle, group_size=group, drop_last=drop, random_level=level
    )
    for epoch in (0, 1):  # the second one is drawn anew, of complexities that are known
        for sampler in made:
            sampler.set_epoch(epoch)
        taken = [list(sampler) for sampler in made]
        assert {len(each) for each in taken} == {len(made[0])}
        every = [index for each in taken for index in each]
        if drop:
            assert len(every) == len(set(every)) == count - count % world
        else:
            assert set(every) == set(range(count))
            assert len(every) < count + world
        assert [list(sampler) for sampler in made] == taken


@pytest.mark.parametrize("shuffle", [True, False])
def test_what_processes_take_at_a_time_are_neighbours_in_complexity(shuffle: bool) -> None:
    lengths, made = samplers(60, 4, shuffle=shuffle)
    order = sorted(range(60), key=lambda i: lengths[i])
    rows = {frozenset(order[i : i + 4]) for i in range(0, 60, 4)}
    taken = [list(sampler) for sampler in made]
    assert {frozenset(row) for row in zip(*taken, strict=True)} == rows
    assert (taken[0] == order[::4]) is not shuffle


def test_groups_move_as_a_whole_and_are_sorted_inside() -> None:
    lengths, (sampler,) = samplers(20, 1, group_size=6)
    before = sorted(
        sorted(range(start, min(start + 6, 20)), key=lambda i: lengths[i])
        for start in range(0, 20, 6)
    )
    for epoch in range(3):
        sampler.set_epoch(epoch)
        order, found = list(sampler), []
        while order:
            group = next(g for g in before if g[0] == order[0])
            assert order[: len(group)] == group
            found.append(group)
            order = order[len(group) :]
        assert sorted(found) == before


def test_epochs_differ_only_where_they_are_shuffled() -> None:
    for shuffle in (True, False):
        _, (sampler,) = samplers(30, 1, shuffle=shuffle)
        first = list(sampler)
        sampler.set_epoch(1)
        assert (list(sampler) == first) is not shuffle


def test_a_higher_random_level_balances_less() -> None:
    lengths = [random.randrange(1, 1000) for _ in range(400)]

    def spread(level: float) -> int:
        sampler = LoadBalancingDistributedSampler(
            lengths, int, world_size=4, rank=0, random_level=level
        )
        return sum(
            max(lengths[i] for i in row) - min(lengths[i] for i in row) for row in sampler.rows()
        )

    assert spread(0) < spread(0.3) < spread(1.0)


def test_complexities_are_asked_for_once() -> None:
    asked: list[int] = []
    sampler = LoadBalancingDistributedSampler(
        range(9), lambda i: asked.append(i) or i, world_size=2, rank=0
    )
    for epoch in range(3):
        sampler.set_epoch(epoch)
        list(sampler)
    assert asked == [*range(9)]


@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_processes_have_as_many_batches(world: int, drop: bool) -> None:
    lengths, made = samplers(47, world)

    def batches(indices: list[int]) -> list[list[int]]:  # of 1500 tokens at most
        found: list[list[int]] = [[]]
        for index in indices:
            if found[-1] and sum(lengths[i] for i in found[-1]) + lengths[index] > 1500:
                found.append([])
            found[-1].append(index)
        return found

    alone = [len(batches(list(sampler))) for sampler in made]
    batched = [LoadBalancingDistributedBatchSampler(s, batches, drop_last=drop) for s in made]
    total = min(alone) if drop else max(alone)
    assert {len(b) for b in batched} == {total}
    for sampler, each, count in zip(made, batched, alone, strict=True):
        own = batches(list(sampler))
        assert list(each) == [own[i % count] for i in range(total)]
        first = list(each)
        each.set_epoch(5)
        assert list(each) != first


BAD = [
    ({"world_size": 2, "rank": 2}, ValueError, "rank=2"),
    ({"world_size": 0, "rank": 0}, ValueError, "world_size=0"),
    ({"world_size": 2, "rank": 0, "group_size": 0}, ValueError, "group_size=0"),
    ({"world_size": 2, "rank": 0, "random_level": 1.5}, ValueError, "random_level=1.5"),
    ({"world_size": 2, "rank": 0, "seed": "1"}, TypeError, "seed='1'"),
    ({"world_size": 99, "rank": 0, "drop_last": True}, ValueError, "a data set of 5 samples"),
    ({}, ValueError, "there is no process group"),
]


@pytest.mark.parametrize(("given", "kind", "told"), BAD)
def test_a_bad_argument_is_named(given: dict[str, object], kind: type, told: str) -> None:
    with pytest.raises(kind, match=told):
        LoadBalancingDistributedSampler(range(5), int, **given)


def test_batches_refuse_what_they_cannot_balance() -> None:
    _, (sampler,) = samplers(4, 1, drop_last=True)
    with pytest.raises(ValueError, match="drop_last"):
        LoadBalancingDistributedBatchSampler(sampler, lambda i: [i])
    with pytest.raises(TypeError, match="sampler"):
        LoadBalancingDistributedBatchSampler(range(3), lambda i: [i])
    _, made = samplers(5, 2)
    with pytest.raises(ValueError, match="no batch for the process 1"):
        list(
            LoadBalancingDistributedBatchSampler(
                made[0], lambda i: [i] if set(i) == {*made[0]} else []
            )
        )

"""Who runs a module's calls, by a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

from ortrain.cache import Cache
from ortrain.frontend.equal import equal_blocks
from ortrain.frontend.policy import (
    BLOCKS,
    CHANGES,
    MISSES,
    MODULE,
    OF_BLOCKS,
    SHARE,
    TORCH,
    Challenger,
    Policy,
    Verdicts,
    challengers_of,
    padding_in,
)
from ortrain.step import marks
from ortrain.step.overhead import Overhead
from ortrain.step.prospect import Prospect
from ortrain.step.recalled import Note
from ortrain.step.verdict import Verdict


class Clock:
    """Seconds, which a test moves on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is made when it pays, and everything is loaded."""
    monkeypatch.setattr("ortrain.frontend.policy.LOADING", 0.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(marks, "clock", found)
    return found


def policy_of(
    challengers: list[Challenger],
    steps: int | None = None,
    known: bool = True,
    note: Note | None = None,
    verdicts: Verdicts | None = None,
) -> Policy:
    prospect = Prospect(steps) if known else None
    return Policy(TORCH, Overhead(), challengers, prospect, verdicts, engine="aten", note=note)


def run(
    policy: Policy,
    clock: Clock,
    seconds: dict[str, float],
    steps: int,
    costs: dict[str, float] | None = None,
    sizes: Callable[[int], int] = lambda _: 1,
) -> list[str]:
    """Steps that take each way so long, and the first of each so much more."""
    costs, ways = dict(costs or {}), []
    for step in range(steps):
        way = policy.next()
        ways.append(way)
        if policy.prospect is not None and policy.prospect.steps is not None:
            policy.prospect.steps -= 1
        start, size = clock.now, sizes(step)
        sample = policy.sample(way, size, start) if policy.measures else None
        if cost := costs.pop(way, 0.0):
            clock.now += cost
            policy.overhead.add("trace", cost)
        clock.now += seconds[way] * size
        if sample is not None:
            sample.forward_ends()
            sample.forward_done([], [], trains=False)
    return ways


WHOLE = Challenger(MODULE, cost=2.0, gain=0.25)
PART = Challenger(BLOCKS, cost=0.5, gain=0.15)


@pytest.mark.parametrize(
    ("graph", "winner"), [(0.03, MODULE), (0.08, MODULE), (0.1, TORCH), (0.3, TORCH)]
)
def test_the_faster_one_stays(clock: Clock, graph: float, winner: str) -> None:
    policy = policy_of([WHOLE], steps=1000)
    ways = run(policy, clock, {TORCH: 0.1, MODULE: graph}, 200, {MODULE: 2.0})
    assert policy.way == winner
    assert policy.settled
    assert ways[-100:] == [winner] * 100
    assert policy.contest is not None
    assert policy.contest.winner == ("graph" if winner == MODULE else "eager")


def test_a_clear_result_takes_few_steps_of_the_slower_one(clock: Clock) -> None:
    policy = policy_of([WHOLE], steps=1000)
    ways = run(policy, clock, {TORCH: 1.0, MODULE: 0.3}, 100, {MODULE: 2.0})
    assert ways.count(TORCH) <= 3
    policy = policy_of([WHOLE], steps=1000)
    ways = run(policy, clock, {TORCH: 1.0, MODULE: 1.5}, 100, {MODULE: 2.0})
    assert ways.count(MODULE) <= 5


def test_a_short_run_has_no_graph(clock: Clock) -> None:
    policy = policy_of([WHOLE], steps=50)
    assert {*run(policy, clock, {TORCH: 0.01, MODULE: 0.001}, 50)} == {TORCH}
    assert policy.contest is not None
    assert policy.contest.waits
    assert "waits: after 20 eager steps or more" in str(policy.contest)


def test_a_run_of_unknown_length_has_one_once_it_has_lasted(clock: Clock) -> None:
    policy = policy_of([WHOLE])
    ways = run(policy, clock, {TORCH: 0.01, MODULE: 0.005}, 3000, {MODULE: 2.0})
    first = ways.index(MODULE)
    assert 2.0 / 0.25 <= first * 0.01 <= 1.3 * 2.0 / 0.25
    assert ways[-1] == MODULE


def test_two_hundred_known_steps_of_a_tenth_of_a_second_are_graphs_from_the_twentieth_on(
    clock: Clock,
) -> None:
    policy = policy_of([WHOLE], steps=200)
    ways = run(policy, clock, {TORCH: 0.1, MODULE: 0.05}, 200, {MODULE: 2.0})
    assert {*ways[20:]} == {MODULE}


def test_blocks_come_first_where_the_whole_does_not_pay_yet(clock: Clock) -> None:
    policy = policy_of([PART, WHOLE])
    seconds = {TORCH: 0.01, BLOCKS: 0.007, MODULE: 0.004}
    ways = run(policy, clock, seconds, 8000, {BLOCKS: 0.5, MODULE: 2.0})
    assert ways.index(BLOCKS) < ways.index(MODULE)
    assert ways[-1] == MODULE
    before = ways.index(MODULE)
    elapsed = sum(seconds[way] for way in ways[:before]) + 0.5
    assert SHARE * elapsed * 1.05 >= 2.0  # what is behind the first graph stays in its budget


def test_the_whole_comes_at_once_where_steps_are_many(clock: Clock) -> None:
    policy = policy_of([PART, WHOLE], steps=1000)
    ways = run(policy, clock, {TORCH: 0.1, BLOCKS: 0.07, MODULE: 0.04}, 300, {MODULE: 2.0})
    assert BLOCKS not in ways
    assert ways[-1] == MODULE


@pytest.mark.parametrize("blocks", [0.095, 0.12])
def test_the_whole_is_the_first_graph_where_blocks_have_saved_little(
    clock: Clock, blocks: float
) -> None:
    policy = policy_of([PART, WHOLE])
    ways = run(
        policy, clock, {TORCH: 0.1, BLOCKS: blocks, MODULE: 0.04}, 300, {BLOCKS: 0.5, MODULE: 2.0}
    )
    first = ways.index(MODULE)
    assert BLOCKS in ways[:first]
    foreseen = WHOLE.gain - PART.gain + max(1 - blocks / 0.1, 0)
    assert first * 0.1 <= 1.3 * (2.0 + 0.5) / foreseen
    assert ways[-1] == MODULE


def test_where_steps_are_long_the_whole_is_tried_at_once(clock: Clock) -> None:
    policy = policy_of([PART, Challenger(MODULE, cost=5.0, gain=0.5)])
    seconds = {TORCH: 2.5, BLOCKS: 2.4, MODULE: 0.8}
    ways = run(policy, clock, seconds, 40, {BLOCKS: 0.5, MODULE: 5.0})
    assert ways.index(MODULE) <= 3
    assert BLOCKS not in ways
    assert ways[-1] == MODULE


def test_a_deep_model_has_blocks_first(clock: Clock) -> None:
    policy = policy_of([PART, Challenger(MODULE, cost=8.0, gain=0.5)], steps=1000)
    seconds = {TORCH: 1.0, BLOCKS: 0.7, MODULE: 0.4}
    ways = run(policy, clock, seconds, 300, {BLOCKS: 0.5, MODULE: 8.0})
    assert ways.index(BLOCKS) <= 3
    assert ways.index(BLOCKS) < ways.index(MODULE)
    assert ways[-1] == MODULE


def test_a_short_run_has_blocks_rather_than_the_whole_whose_cost_nobody_knows(
    clock: Clock,
) -> None:
    policy = policy_of([Challenger(BLOCKS, 1.2, 0.3), Challenger(MODULE, 2.4, 0.5)], steps=64)
    ways = run(policy, clock, {TORCH: 0.15, BLOCKS: 0.1, MODULE: 0.08}, 64, {BLOCKS: 1.2})
    assert BLOCKS in ways
    assert MODULE not in ways


@pytest.mark.parametrize(("steps", "found"), [(60, [BLOCKS]), (600, [MODULE]), (None, [BLOCKS])])
def test_code_that_turns_out_to_be_several_graphs_is_weighed_anew(
    clock: Clock, steps: int | None, found: list[str]
) -> None:
    whole = Challenger(MODULE, 1.5, 0.7, in_parts=0.5)
    policy = policy_of([Challenger(BLOCKS, 1.2, 0.3), whole], steps)
    seconds = {TORCH: 0.15, BLOCKS: 0.1, MODULE: 0.08}
    ways = []
    for _ in range(70):
        way = policy.next()
        ways.append(way)
        sample = policy.sample(way, 1, clock.now) if policy.measures else None
        if way == MODULE and ways.count(way) == 1:
            clock.now += 1.5
            policy.overhead.add("trace", 1.5)
            if not policy.may_part():
                policy.void()
                way = TORCH
        clock.now += seconds[way]
        if sample is not None:
            sample.forward_ends()
            sample.forward_done([], [], trains=False)
    assert MODULE in ways[:4]
    assert {*ways[-30:]} == {*found}


def test_code_that_is_known_to_be_several_graphs_has_blocks_first(clock: Clock) -> None:
    whole = Challenger(MODULE, 1.5, 0.7, in_parts=0.5)
    policy = policy_of([Challenger(BLOCKS, 1.2, 0.3), whole], steps=100)
    policy.expect_parts()
    policy.expect_parts()
    ways = run(policy, clock, {TORCH: 0.15, BLOCKS: 0.1, MODULE: 0.08}, 100, {BLOCKS: 1.2})
    assert BLOCKS in ways[:4]
    assert MODULE not in ways


def test_batches_of_different_sizes_are_compared_by_size(clock: Clock) -> None:
    policy = policy_of([WHOLE], steps=1000)
    seconds = {TORCH: 0.001, MODULE: 0.0009}
    run(policy, clock, seconds, 600, {MODULE: 2.0}, sizes=lambda step: 50 + step % 100)
    assert policy.way == MODULE


def test_a_step_with_overhead_in_it_is_not_counted(clock: Clock) -> None:
    policy = policy_of([WHOLE], steps=1000)
    run(policy, clock, {TORCH: 0.1, MODULE: 0.05}, 100, {MODULE: 5.0})
    assert policy.contest is not None
    assert max(policy.contest.graph) < 0.06
    assert policy.overhead.seconds["trace"] == 5.0
    assert "trace 5.0" in str(policy.overhead)


def test_code_that_changes_at_each_call_is_given_up(clock: Clock) -> None:
    policy = policy_of([WHOLE], steps=1000)
    ways = []
    for _ in range(200):
        way = policy.next()
        ways.append(way)
        sample = policy.sample(way, 1, clock.now) if policy.measures else None
        may = policy.may_convert
        if way == MODULE and may:
            clock.now += 1.5
            policy.overhead.add("trace", 1.5)
        clock.now += 0.1
        if way == MODULE and not may:
            policy.void()
            policy.missed()
        if sample is not None:
            sample.forward_ends()
            sample.forward_done([], [], trains=False)
    assert policy.overhead.total <= 2 * 2.0 + 1.5
    assert ways.count(MODULE) <= MISSES + 4
    assert ways[-1] == TORCH
    assert policy.reason == CHANGES


def test_a_settled_graph_has_a_budget_for_further_ones(clock: Clock) -> None:
    policy = policy_of([WHOLE], steps=1000)
    run(policy, clock, {TORCH: 0.1, MODULE: 0.05}, 100, {MODULE: 2.0})
    assert policy.may_convert
    policy.overhead.add("trace", 3.0)
    assert not policy.may_convert
    clock.now += 100
    assert policy.may_convert


def test_a_way_that_cannot_run_leaves_the_others(clock: Clock) -> None:
    policy = policy_of([PART, WHOLE], steps=1000)
    seconds = {TORCH: 0.1, BLOCKS: 0.05, MODULE: 0.02}
    run(policy, clock, seconds, 3)
    policy.forfeit(MODULE, "there is none")
    ways = run(policy, clock, seconds, 100, {BLOCKS: 0.5})
    assert policy.way == ways[-1] == BLOCKS
    policy.forfeit(BLOCKS, "nor here")
    assert policy.next() == TORCH
    assert policy.reason == "nor here"


def test_overhead_counts_what_is_inside_once(clock: Clock) -> None:
    overhead = Overhead()
    with overhead.of("trace"):
        clock.now += 1
        with overhead.of("build"):
            clock.now += 2
        clock.now += 4
    assert overhead.seconds == {"trace": 5.0, "build": 2.0}
    clock.now = 100.0
    assert str(overhead) == "7.0 s of 100 s: trace 5.0, build 2.0"


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)


def test_equal_blocks_are_the_members_of_a_list() -> None:
    layers = [Block() for _ in range(12)]
    model = nn.ModuleDict({"body": nn.ModuleList(layers), "head": nn.Linear(4, 4)})
    assert equal_blocks(model) == layers
    assert equal_blocks(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == []
    assert equal_blocks(nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])) == []
    two = nn.Sequential(Block(), Block())
    assert [each.way for each in challengers_of(two, 0.25, trains=True)] == [MODULE]
    deep = nn.ModuleList([Block() for _ in range(60)])
    assert [each.way for each in challengers_of(deep, 0.25, trains=True)] == [BLOCKS, MODULE]
    assert [each.way for each in challengers_of(deep, 0.25, trains=False)] == [MODULE]


def test_padding_is_what_the_whole_gains_and_blocks_do_not() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    assert padding_in({"attention_mask": mask}) == 0.25
    assert padding_in({"attention_mask": mask.bool()}) == 0.25
    assert padding_in({"attention_mask": None, "x": mask}) == 0
    assert padding_in({"attention_mask": torch.empty(0, 4)}) == 0
    deep = nn.ModuleList([Block() for _ in range(60)])
    blocks, whole = challengers_of(deep, 0.5, trains=True, padding=0.5)
    assert whole.gain == 0.75
    assert (blocks.way, blocks.gain) == (BLOCKS, 0.5 * OF_BLOCKS)


@pytest.mark.parametrize("seconds", [0.5, 2.0])
def test_what_an_earlier_process_has_found_needs_no_turns(
    clock: Clock, tmp_path: Path, seconds: float
) -> None:
    both = {TORCH: 1.0, MODULE: seconds}
    note = Note(Cache(tmp_path), (BLOCKS, "aten"), "of a module")
    winner = MODULE if seconds < 1 else TORCH
    for known in (False, True):
        policy = policy_of([WHOLE], steps=1000, note=note)
        ways = run(policy, clock, both, 40)
        assert policy.contest is not None
        assert policy.contest.recalled is known
        assert ways[-1] == winner
    assert (ways.count(MODULE) == 0) == (winner == TORCH)
    assert ways == sorted(ways, key=lambda way: way == winner)  # no turn back
    policy = policy_of([WHOLE], steps=1000, note=note)
    run(policy, clock, {way: 3 * each for way, each in both.items()}, 40)
    assert policy.contest is not None
    assert not policy.contest.recalled, "a busy machine"


class Processes:
    """Two that train together, of which a test runs one at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.leads, store = True, distributed.HashStore()
        monkeypatch.setattr(Verdict, "of", lambda name: Verdict(store, self.leads, name))

    def run(
        self, leads: bool, clock: Clock, ways: list[Challenger], seconds: dict[str, float]
    ) -> list[str]:
        self.leads = leads
        return run(policy_of(ways, steps=1000, verdicts=Verdicts("a model")), clock, seconds, 60)


@pytest.mark.parametrize(("graph", "other"), [(0.5, 2.0), (2.0, 0.5)])
def test_the_first_processs_clock_decides_for_all(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, graph: float, other: float
) -> None:
    processes = Processes(monkeypatch)
    waiting = processes.run(False, clock, [WHOLE], {TORCH: 1.0, MODULE: other})
    assert waiting[-20:] == [TORCH] * 20  # there is no verdict yet, and nobody waits for it
    first = processes.run(True, clock, [WHOLE], {TORCH: 1.0, MODULE: graph})
    second = processes.run(False, clock, [WHOLE], {TORCH: 1.0, MODULE: other})
    assert first[-1] == second[-1] == (MODULE if graph < 1 else TORCH)


def test_a_process_that_has_tried_blocks_follows_the_first_to_the_whole(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = Processes(monkeypatch)
    seconds = {TORCH: 1.0, BLOCKS: 0.8, MODULE: 0.5}
    assert processes.run(True, clock, [WHOLE], seconds)[-1] == MODULE
    slow = Challenger(MODULE, cost=400.0, gain=0.25)
    ways = processes.run(False, clock, [PART, slow], {**seconds, MODULE: 3.0})
    assert BLOCKS in ways
    assert ways[-1] == MODULE

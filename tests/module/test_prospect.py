"""A short run is not made slower: no graph is made before one is likely to pay."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from ortrain import Options, ORTModule
from ortrain.step import contest
from ortrain.step.contest import LEAST_STEPS, MOST_STEPS, WARM_UP, Race
from ortrain.step.prospect import Prospect

# The fixture of all tests has replaced it: what it does is in its class's source.
PAYS = Prospect.pays


@pytest.fixture(autouse=True)
def waiting(monkeypatch: pytest.MonkeyPatch, no_waiting: None) -> None:
    """As outside of tests."""
    monkeypatch.setattr(Prospect, "pays", PAYS)


class Clock:
    """A second passes at each look."""

    def __init__(self, tick: float) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


class Hand:
    """Time that passes where a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Hand:
    hand = Hand()
    monkeypatch.setattr(contest, "clock", hand)
    return hand


def steps(model: ORTModule, count: int) -> None:
    for _ in range(count):
        model(torch.ones(2, 3)).sum().backward()


def test_parts_are_judged_together_unless_it_is_known_how_long_each_will_run() -> None:
    part = Prospect(cost=1.0, gain=0.25, together=10.0)
    assert not part.pays(39.0, 1.0)
    assert part.pays(41.0, 1.0)
    assert part.rest(30.0) == 10.0
    part.steps = 5
    assert part.pays(0.0, 1.0)


@pytest.mark.parametrize(("elapsed", "pays"), [(10.0, False), (39.0, False), (41.0, True)])
def test_a_run_is_taken_to_last_as_long_again_as_it_has(elapsed: float, pays: bool) -> None:
    assert Prospect(cost=10.0, gain=0.25).pays(elapsed, 1.0) is pays


@pytest.mark.parametrize(("left", "pays"), [(10, False), (39, False), (41, True), (10_000, True)])
def test_who_knows_what_is_to_come_is_believed(left: int, pays: bool) -> None:
    prospect = Prospect(cost=10.0, gain=0.25, steps=left)
    for elapsed in (0.0, 1e6):
        assert prospect.pays(elapsed, 1.0) is pays


def test_more_layers_cost_more() -> None:
    small, large = nn.Linear(2, 2), nn.Sequential(*(nn.Linear(2, 2) for _ in range(50)))
    assert Prospect.of(small).cost < Prospect.of(large).cost


def test_a_short_run_is_never_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ORTModule(nn.Linear(3, 2))
    monkeypatch.setattr(contest, "clock", Clock(1e-6))
    steps(model, 400)
    assert model.report.captures == 0
    assert model.report.contest is not None
    assert model.report.contest.waits
    assert "too short" in str(model.report)


def test_a_long_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ORTModule(nn.Linear(3, 2))
    monkeypatch.setattr(contest, "clock", Clock(0.01))
    for _ in itertools.takewhile(lambda _: not model.report.captures, range(1000)):
        steps(model, 1)
    assert model.report.captures == 1


def test_steps_to_come_decide_for_a_loop_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "clock", Clock(0.001))
    for left, captures in ((10, 0), (1_000_000, 1)):
        model = ORTModule(nn.Linear(3, 2))
        model.steps_to_come = left
        steps(model, 200)
        assert model.steps_to_come == left
        assert model.report.captures == captures


def test_a_chosen_engine_waits_for_nothing() -> None:
    model = ORTModule(nn.Linear(3, 2), options=Options(engine="onnxruntime"))
    steps(model, 1)
    assert model.report.captures == 1


@pytest.mark.parametrize(("steps", "looks"), [(None, 1), (200, 12)])
def test_while_no_graph_pays_few_steps_are_watched(
    clock: Hand, steps: int | None, looks: int
) -> None:
    """Neither the steps that are timed nor what is asked at each grows with the run."""
    race = Race(["graph"], Prospect(cost=10.0, steps=steps))
    watched = 0
    for _ in range(30_000):
        assert race.next() == "eager"
        watched += not race.rest
        sample = None if race.rest else race.sample("eager", 1, clock())
        clock.now += 1e-3
        if sample is not None:
            sample.forward_done([], [], trains=False)
    assert race.contest.waits
    assert len(race.contest.eager) >= LEAST_STEPS
    assert watched <= looks * (MOST_STEPS + WARM_UP + 1)


def test_a_rest_ends_when_it_pays_and_when_it_is_told_to(clock: Hand) -> None:
    prospect = Prospect(cost=10.0)
    race, told = Race(["graph"], prospect), Race(["graph"], Prospect(cost=10.0))
    for _ in range(39_990):  # a quarter of 40 seconds is as much
        for each in (race, told):
            assert each.next() == "eager"
        samples = [each.sample("eager", 1, clock()) for each in (race, told) if not each.rest]
        clock.now += 1e-3
        for sample in samples:
            sample.forward_done([], [], trains=False)
    assert race.rest
    clock.now += 0.1
    turns = [_turn(race, clock, 1e-3) for _ in range(2 * MOST_STEPS)]
    assert turns[:MOST_STEPS] == ["eager"] * MOST_STEPS
    assert turns[-1] == "graph"

    assert told.prospect is not None
    told.prospect.steps = 1_000_000
    assert told.next() == "eager"
    assert not told.rest


def _turn(race: Race, clock: Hand, seconds: float) -> str:
    turn = race.next()
    sample = race.sample(turn, 1, clock())
    clock.now += seconds
    sample.forward_done([], [], trains=False)
    return turn

"""A short run is not made slower: no graph is made before one is likely to pay."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from ortrain import Options, ORTModule
from ortrain.runtime.engines import LineUp
from ortrain.step import marks
from ortrain.step.contest import LEAST_STEPS, MOST_STEPS, WARM_UP, Race
from ortrain.step.prospect import (
    CERTIFICATE,
    GAIN,
    GAIN_OF_NARROW,
    LEAD,
    LONG,
    OF_CONVOLUTIONS,
    OF_RECURRENT,
    RIVAL,
    Prospect,
    gain_of,
    share_of,
)


@pytest.fixture(autouse=True)
def no_waiting() -> None:
    """A graph is made when it pays, as outside of tests."""


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
    monkeypatch.setattr(marks, "clock", hand)
    return hand


def steps(model: ORTModule, count: int) -> None:
    for _ in range(count):
        model(torch.ones(2, 3)).sum().backward()


def test_parts_are_judged_together_unless_it_is_known_how_long_each_will_run() -> None:
    part = Prospect(cost=1.0, together=10.0)
    assert not part.pays(43.0, 0.4, 0.25)
    assert part.pays(44.0, 0.4, 0.25)
    assert part.rest(30.0, 0.4, 0.25) == pytest.approx(13.2)
    part.steps = 19
    assert part.pays(0.0, 0.4, 0.25)


@pytest.mark.parametrize("together", [0.0, 8.0])
@pytest.mark.parametrize("gain", [0.1, 0.5])
def test_where_steps_are_long_the_graph_is_tried_at_once(together: float, gain: float) -> None:
    """More than a twentieth of what a capture, or those of all parts, take."""
    prospect = Prospect(cost=4.0, together=together)
    longest = max(4.0, together) / 20
    assert not prospect.pays(0.0, longest * 0.99, gain)
    assert prospect.pays(0.0, longest * 1.01, gain)
    assert not prospect.of_rival().pays(0.0, longest * 1.01, gain)
    prospect.steps = 3
    assert not prospect.pays(0.0, longest * 1.01, gain)


def test_a_graph_of_long_steps_has_the_third_one(clock: Hand) -> None:
    race, turns = Race(["graph"], Prospect(3.0)), list[str]()
    for _ in range(3):
        turns.append(race.next())
        sample = race.sample(turns[-1], 1, clock())
        clock.now += 1.0
        sample.forward_done([], [], trains=False)
    assert turns == ["eager", "eager", "graph"]


@pytest.mark.parametrize(("elapsed", "pays"), [(10.0, False), (43.0, False), (45.0, True)])
def test_a_run_of_short_steps_is_taken_to_last_as_long_again(elapsed: float, pays: bool) -> None:
    assert Prospect(cost=10.0).pays(elapsed, 0.5, 0.25) is pays


@pytest.mark.parametrize(("left", "pays"), [(10, False), (47, False), (49, True), (10_000, True)])
def test_who_knows_what_is_to_come_is_believed(left: int, pays: bool) -> None:
    prospect = Prospect(cost=10.0, steps=left)
    for elapsed in (0.0, 1e6):
        assert prospect.pays(elapsed, 1.0, 0.25) is pays


@pytest.mark.parametrize("steps", [None, 6, 60, 600])
@pytest.mark.parametrize("gain", [0.1, 0.33, 0.5])
@pytest.mark.parametrize("step", [1e-4, 0.01, 0.3, 5.0])
@pytest.mark.parametrize("cost", [0.1, 4.0])
def test_a_graph_pays_when_it_saves_more_than_capture_and_certificate_take(
    cost: float, step: float, gain: float, steps: int | None
) -> None:
    prospect = Prospect(cost, steps)
    for elapsed in (0.0, 0.1, 10.0, 1000.0):
        to_come = elapsed if steps is None else steps * step
        is_long = steps is None and step > cost * LONG
        saves = to_come * gain > cost + CERTIFICATE * step
        assert prospect.pays(elapsed, step, gain) is (is_long or saves)
        if steps is None and not prospect.pays(elapsed, step, gain):
            later = elapsed + prospect.rest(elapsed, step, gain)
            assert not prospect.pays(later * 0.999, step, gain)
            assert prospect.pays(later * 1.001, step, gain)


@pytest.mark.parametrize(
    ("maker", "family", "wide"),
    [
        ("AuthenticAMD", "26", 0.5), ("AuthenticAMD", "25", 0.25), ("AuthenticAMD", "", 0.25),
        ("GenuineIntel", "6", 0.2), ("", "", GAIN), ("ARM", "", GAIN),
    ],
)  # fmt: skip
def test_what_is_to_be_gained_goes_by_precision_and_processor(
    monkeypatch: pytest.MonkeyPatch, maker: str, family: str, wide: float
) -> None:
    known = {"vendor_id": maker, "cpu family": family}
    monkeypatch.setattr("ortrain.step.prospect.cpuinfo", lambda: known)
    assert gain_of({torch.float32, torch.int64, torch.bool}) == wide
    assert gain_of({torch.float64}) == wide
    for narrow in (torch.bfloat16, torch.float16):
        assert gain_of({torch.float32, narrow}) == GAIN_OF_NARROW
    assert gain_of({torch.int16}) == wide
    assert gain_of({torch.bfloat16}, torch.device("cuda")) == GAIN


def test_layers_that_run_the_same_kernels_in_a_graph_save_little() -> None:
    assert share_of(nn.Linear(4, 4)) == 1.0
    assert share_of(nn.Conv1d(4, 4, 3)) == OF_CONVOLUTIONS
    assert share_of(nn.LSTM(4, 4)) == OF_RECURRENT
    both = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Conv2d(10, 10, 1, bias=False))
    assert share_of(both) == pytest.approx((1 + OF_CONVOLUTIONS) / 2)
    assert share_of(nn.Sequential(nn.Embedding(1000, 4), nn.Linear(4, 4))) == 1.0
    assert share_of(nn.ReLU()) == 1.0


def test_a_fine_tuning_of_sixty_steps_gets_a_graph() -> None:
    """MiniLM's shape, 81 layers, in bfloat16 at 0.27 s a step, a quarter of it padding."""
    gain = 1 - (1 - GAIN_OF_NARROW) * 0.75
    prospect = replace(Prospect.of(nn.ModuleList(nn.Linear(1, 1) for _ in range(81))), steps=58)
    assert prospect.pays(0.6, 0.27, gain)
    prospect.steps = 20
    assert not prospect.pays(0.6, 0.27, gain)


@pytest.mark.old_front_end
def test_each_race_has_the_gain_of_its_own_precision() -> None:
    model = ORTModule(nn.Linear(3, 3), options=Options(engine="auto"))
    for narrow in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            model(torch.ones(2, 3))
    races = [form.race for state in model._runner.states for form in state.forms.values()]
    gains = [race.gain for race in races if race is not None]
    assert gains == [gain_of({torch.float32}), GAIN_OF_NARROW]


def test_more_layers_cost_more() -> None:
    small, large = nn.Linear(2, 2), nn.Sequential(*(nn.Linear(2, 2) for _ in range(50)))
    assert Prospect.of(small).cost < Prospect.of(large).cost


def test_a_short_run_is_never_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ORTModule(nn.Linear(3, 2))
    monkeypatch.setattr(marks, "clock", Clock(1e-6))
    steps(model, 400)
    assert model.report.captures == 0
    assert model.report.contest is not None
    assert model.report.contest.waits
    assert "too short" in str(model.report)


def test_a_long_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ORTModule(nn.Linear(3, 2))
    monkeypatch.setattr(marks, "clock", Clock(0.01))
    for _ in itertools.takewhile(lambda _: not model.report.captures, range(1000)):
        steps(model, 1)
    assert model.report.captures == 1


def test_steps_to_come_decide_for_a_loop_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "clock", Clock(0.001))
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
    # A quarter of 40 seconds is as much, and 8 ms of a certificate; a turn of eager's comes before.
    for _ in range(39_950):
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


@pytest.mark.parametrize(("b", "winner"), [(0.1, "b"), (0.19, "b"), (0.199, "a"), (0.3, "a")])
@pytest.mark.parametrize(
    ("steps", "since"),
    [(60, math.inf), (1000, 0.0), (None, (RIVAL + 2 * 0.2) / LEAD)],
    ids=["a short run", "a long run", "a run of unknown length"],
)
def test_a_rival_meets_the_winner_once_the_run_is_long_enough(
    clock: Hand, steps: int | None, since: float, b: float, winner: str
) -> None:
    race, seconds = Race("ab", Prospect(1.0, steps)), {"eager": 0.5, "a": 0.2, "b": b}
    began: dict[str, float] = {}
    for _ in range(1000):
        turn = race.next()
        if turn != "eager" and not race.winner:
            turn = race.choose(lambda known: LineUp(("a",), ("b",)))
        began.setdefault(turn, clock.now)
        if race.winner:
            began.setdefault(f"{turn} has won", clock.now)
            clock.now += seconds[turn]
        else:
            sample = race.sample(turn, 1, clock())
            clock.now += seconds[turn]
            sample.forward_done([], [], trains=False)
    if since == math.inf:
        assert "b" not in began
        assert race.winner == "a"
        assert str(race.contest).endswith("; a long run will try b as well")
        return
    decided = began["a has won"] if since else began["b"]
    assert decided <= began["b"]
    assert began["b"] == pytest.approx(max(since, decided), abs=0.3)
    assert race.winner == race.contest.engine == winner
    assert race.contest.winner == "graph"
    assert {*race.contest.engines} == {"a", "b"}
    assert race.contest.eager
    assert "a long run" not in str(race.contest)


@pytest.mark.parametrize(("graph", "looks"), [(0.5, 0), (0.75, LEAST_STEPS + WARM_UP)])
def test_steps_before_a_graph_is_due_are_no_part_of_what_the_contest_costs(
    clock: Hand, graph: float, looks: int
) -> None:
    """After so many no second look at eager is needed, where the graph is faster beyond doubt."""
    race, turns = Race(["graph"], Prospect(21.0)), list[str]()
    while True:
        turns.append(race.next())
        if race.winner:
            break
        sample = race.sample(turns[-1], 1, clock())
        clock.now += graph if turns[-1] == "graph" else 1.0
        sample.forward_done([], [], trains=False)
    assert turns.count("eager") > looks + LEAST_STEPS + WARM_UP
    assert race.contest.cost == pytest.approx((1 - graph) * looks)

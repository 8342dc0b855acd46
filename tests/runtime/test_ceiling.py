"""Holes of the heap go back to the system before a process takes too much."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ortrain
from ortrain import Options, ORTModule
from ortrain.runtime import memory
from ortrain.runtime.memory import Ceiling


class Process:
    """What takes memory: blocks in use, holes between them, and what is not of the heap."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used, self.holes, self.elsewhere, self.closed, self.most = 100, 0, 1000, 0, 1200
        monkeypatch.setattr(memory, "resident", lambda: self.used + self.holes + self.elsewhere)
        monkeypatch.setattr(memory, "in_use", lambda: self.used)
        monkeypatch.setattr(memory, "most_resident", lambda: self.most)
        monkeypatch.setattr(memory, "release_free_memory", self.close)

    def close(self) -> None:
        self.holes, self.closed = 0, self.closed + 1


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    return Process(monkeypatch)


@pytest.fixture
def ceiling(process: Process) -> Ceiling:
    """Of 50 bytes for a step whose largest tensor has 10."""
    made = Ceiling()
    made.limit, made.margin = 50, 10
    made.begin()
    process.closed = 0
    return made


def test_holes_stay_below_the_ceiling(process: Process, ceiling: Ceiling) -> None:
    process.used, process.holes = 120, 20
    ceiling()
    assert process.holes == 20
    process.holes = 21  # the next tensor may not fit any more
    ceiling()
    assert process.holes == 0


def test_a_step_at_its_most_does_not_give_back_at_each_line(
    process: Process, ceiling: Ceiling
) -> None:
    process.used = 149
    for _ in range(5):
        ceiling()
    assert process.closed == 1
    process.holes = 6  # half of the largest tensor
    ceiling()
    assert process.closed == 2


def test_a_larger_step_raises_it(process: Process, ceiling: Ceiling) -> None:
    process.used = 180
    ceiling()
    assert ceiling.limit == 80
    process.used = 100
    ceiling.begin()
    process.used, process.closed = 165, 0
    ceiling()
    assert process.closed == 0


def test_what_is_there_before_a_step_is_not_of_it(process: Process, ceiling: Ceiling) -> None:
    """Such as the optimizer's states, which the first step finds none of."""
    process.used, process.closed = 300, 0
    ceiling.begin()
    process.used = 330
    ceiling()
    assert process.closed == 0


def test_without_a_limit_steps_take_what_the_process_has_taken_before(process: Process) -> None:
    ceiling = Ceiling()
    ceiling.begin()
    process.holes = 100
    ceiling()
    assert process.closed == 0
    process.holes = 101
    ceiling()
    assert (process.closed, process.holes) == (1, 0)
    process.most = 5000  # as a larger batch in PyTorch has taken since
    ceiling.begin()
    process.holes = 3900
    ceiling()
    assert process.closed == 1


def test_a_step_that_needs_more_than_the_process_ever_took_gives_holes_back_once(
    process: Process,
) -> None:
    ceiling = Ceiling()
    for _ in range(100):
        ceiling.begin()
        process.used, process.holes = 400, 0
        ceiling()
        process.used = 100
    assert process.closed == 1


def test_what_is_said_of_this_process_is_true() -> None:
    if not Ceiling.serves():
        pytest.skip("the C library is another one")
    memory.release_free_memory()  # else the block may lie in pages that an earlier test has left
    before, used = memory.resident(), memory.in_use()
    block = torch.ones(8 << 20)
    assert memory.in_use() - used >= 32 << 20
    assert memory.resident() - before >= 24 << 20
    assert memory.most_resident() >= memory.resident() - (1 << 20)
    del block


def wide() -> nn.Module:
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)), nn.GELU(), nn.Linear(512, 512))


@pytest.mark.parametrize("budget", [None, 0.95])
def test_a_step_looks_where_it_has_a_budget(budget: float | None) -> None:
    if not Ceiling.serves():
        pytest.skip("the C library is another one")
    x = torch.randn(4096, 512)
    options = Options(engine="aten", memory_budget=budget, fallback="raise")
    assert ("ceiling()" in str(ortrain.explain(wide(), x, options=options))) == bool(budget)
    torch.manual_seed(0)
    module = wide()
    model = ORTModule(module, options=options)
    model(x).square().mean().backward()
    ours = [p.grad for p in module.parameters()]
    module.zero_grad()
    module(x).square().mean().backward()
    for mine, parameter in zip(ours, module.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad)


@pytest.mark.parametrize("budget", [None, 0.95])
def test_a_graph_has_a_ceiling_and_a_limit_where_there_is_a_budget(budget: float | None) -> None:
    if not Ceiling.serves():
        pytest.skip("the C library is another one")
    model = ORTModule(wide(), options=Options(engine="aten", memory_budget=budget))
    model(torch.randn(4096, 512)).square().mean().backward()
    [graph] = model._runner.graphs.last.graphs
    ceiling = graph.executor.ceiling
    assert (ceiling.limit > 8 << 20) == bool(budget)
    assert (ceiling.margin > 4 << 20) == bool(budget)

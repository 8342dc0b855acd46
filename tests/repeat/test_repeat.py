"""Pairs of runs are compared to the bit: what `make test-repeat` writes down."""

from __future__ import annotations

import pytest

from tests.repeat import __main__ as repeat


def test_runs_part_where_a_loss_differs_in_its_last_bit() -> None:
    first = {"losses": [0.5, 0.25, 0.1], "graph": 2}
    second = {"losses": [0.5, 0.25000000000000006, 0.2], "graph": 1}
    found = repeat.compared(first, second)
    assert found["apart"] == 1.0
    assert found["parted at step"] == 1
    assert (found["graph steps"], found["last losses"]) == ([2, 1], [0.1, 0.2])
    assert (repeat.equal([found]), repeat.alike([found])) == (0, 0)
    assert repeat.alike([{**found, "apart": 1e-6}]) == 1
    assert repeat.compared(first, first)["parted at step"] is None


def test_a_run_draws_the_same_batches_and_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeat, "STEPS", 2)
    first = repeat.run(3)
    assert len(first["losses"]) == 2
    assert repeat.run(3)["losses"] == first["losses"]
    assert repeat.run(4)["losses"] != first["losses"]

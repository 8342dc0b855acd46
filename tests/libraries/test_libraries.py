"""Libraries train through a graph as they train plainly: a sample of `make test-libraries`."""

from __future__ import annotations

import importlib
import json
from importlib.util import find_spec

import pytest

from tests.breadth import sampled
from tests.libraries.__main__ import RESULTS, ROWS, apart
from tests.libraries.page import PAGE, tables
from tests.libraries.ways import Way

# A row of each way to wrap something: a trainer, a module in an own loop, one inside of a model.
SAMPLE = ("sft", "sft-bf16", "lora", "gcn", "accelerate")
NAMES = [name for name, row in ROWS.items() if not row.smoke]


@pytest.mark.libraries
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # the libraries' own
@pytest.mark.parametrize("name", sampled(NAMES, SAMPLE))
def test_a_library_trains_as_it_does_plainly(name: str) -> None:
    row = ROWS[name]
    if find_spec(row.package) is None:
        pytest.skip(f"{row.package} is not installed")
    place, function = row.place.split(".")
    train = getattr(importlib.import_module(f"tests.libraries.{place}"), function)
    plain, ours = Way(None, 4), Way({"engine": "aten"}, 4)
    for way in (plain, ours):
        train(way)
    difference = apart(plain.losses, ours.losses)
    assert difference is not None
    assert difference < (2e-2 if "bf16" in name else 1e-3)
    if name in SAMPLE:
        assert sum(report.graph_calls for report in ours.reports())


def test_losses_are_compared_relative_to_each() -> None:
    assert apart([2.0, 1.0], [2.0, 1.1]) == pytest.approx(0.1)
    assert apart([1.0, 0.0], [1.0, 1e-4]) == pytest.approx(1e-2)
    assert apart([1.0], []) is None


def test_the_page_is_that_of_the_results() -> None:
    assert tables(json.loads(RESULTS.read_text()), ROWS) in PAGE.read_text()


def test_a_row_that_was_stopped_says_so() -> None:
    run = {"seconds": 2.0, "graph": 1, "eager": 1, "captures": 3, "reasons": ["a hook\nmore"]}
    found = {
        "plain, 20": run,
        "aten, 20": run,
        "difference": 1e-6,
        "processor": "amd-zen5",
        "plain, 60": run,
        "default, 60": {**run, "seconds": 4.0},
        "plain, 300": run,
        "default, 300": {"failed": "stopped"},
    }
    text = tables({"2.0": {"sft": found}}, ROWS)
    assert "1e-06 (50% graph) | 2.0 → 4.0 (0.50×) | **2.0 → stopped** |" in text
    found["default, 300"] = run
    assert "| 3 | 50% | amd-zen5 |" in tables({"2.0": {"sft": found}}, ROWS)
    assert "- trl, SFT, varied lengths: a hook" in tables({"2.0": {"sft": found}}, ROWS)

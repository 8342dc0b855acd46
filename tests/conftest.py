"""What holds for every test: fixed seeds, one thread, no hub."""

from __future__ import annotations

import gc
import os

# Before anything imports the hub's package, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"

import itertools
import random
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from ortrain.pytorch.autocast import autocast_depth
from tests.breadth import THINNED, beyond

# The tests run in parallel, and sums over one thread are always in the same order.
torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks those cases of tests with ``breadth`` that are not in the sample."""
    folders = {Path(__file__).parent / name for name in THINNED}
    tests: dict[str, dict[str, pytest.Function]] = {}
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and hasattr(item, "callspec")
            and item.get_closest_marker("breadth") is None
            and not folders.isdisjoint((item.path, *item.path.parents))
        ):
            tests.setdefault(item.nodeid.partition("[")[0], {})[item.name] = item
    for cases in tests.values():
        for name in beyond({name: item.callspec.params for name, item in cases.items()}):
            cases[name].add_marker("breadth")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before its fixtures are made: skips what needs an extra."""
    for extra in ("deepspeed", "lightning"):
        if item.get_closest_marker(extra) is not None and find_spec(extra) is None:
            pytest.skip(f"the extra `{extra}` is not installed")


@pytest.fixture(autouse=True)
def graphs_of_their_own() -> None:
    """No test finds a graph that an earlier one has made."""
    if (backend := sys.modules.get("ortrain.frontend.backend")) is not None:
        backend._KNOWN.clear()


@pytest.fixture(autouse=True)
def regions_are_left() -> Iterator[None]:
    """Nothing leaves autocast half: its casts would stay as they are while weights change."""
    before = autocast_depth()
    yield
    assert autocast_depth() == before


@pytest.fixture(autouse=True)
def no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a capture may take long, and tests compare what is printed."""
    monkeypatch.setattr("ortrain.step.progress.FIRST", 1e6)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is made at once: tests are short runs, in which none would pay."""
    monkeypatch.setattr("ortrain.frontend.policy.Policy._pays", lambda *_: True)


@pytest.fixture
def graph_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contests last a number of steps that no machine decides, and the graph wins them."""
    ticks = itertools.count()  # so all steps take as long
    monkeypatch.setattr("ortrain.step.marks.clock", lambda: float(next(ticks)))
    monkeypatch.setattr("ortrain.frontend.autotune.ROUNDS", 1)
    monkeypatch.setattr("ortrain.frontend.autotune.MARGIN", 1e9)


@pytest.fixture
def one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step of a small model keeps is too little for a backward of several pieces."""
    monkeypatch.setattr("ortrain.step.build.PIECE_BYTES", 32 << 20)
    monkeypatch.setattr("ortrain.autodiff.attention._RATIO", 3)


@pytest.fixture(autouse=True, scope="module")
def frozen_heap() -> Iterator[None]:
    """What a file leaves behind is no garbage: a full collection at the end took 2 to 5 s else."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seeds the global generators before each test; the seed, for generators of the test's own."""
    value = 20
    random.seed(value)
    np.random.seed(value)  # noqa: NPY002 - the global one is the point
    torch.manual_seed(value)
    return value

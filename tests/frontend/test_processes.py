"""Two processes that train together: what each computes is PyTorch's, and none waits for ever.

A fault is in the last process alone. Where the two then decide differently, their exchanges have to
stay the same: a training that does not end is a deadlock.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frontend.training_process import FAULTS, OF_DATA, OF_DDP, OF_FSDP, SETTINGS
from tests.processes import launch

pytestmark = [
    pytest.mark.slow,  # each launch loads torch twice, and makes graphs for a minute
    pytest.mark.timeout(400),
]

PROCESS = Path(__file__).with_name("training_process.py")


def training(way: str, **more: Any) -> dict[str, Any]:
    run = {"way": way, "fault": "", "of": "", "engine": "aten", "checkpoints": False}
    return {**run, "exchanges": False, "zero": False, "no_sync": False, "steps": 6, **more}


def named(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    usual = training("")
    return {
        ", ".join(
            str(value) if isinstance(value, str) else name
            for name, value in run.items()
            if value != usual[name]
        ): run
        for run in runs
    }


DDP = ["unused", "static", "views", "small buckets"]
WAYS = named([training(way.__name__) for way in OF_DDP])
REPLICATED = named(
    [
        *(training("ddp_outside", of=of) for of in DDP),
        *(training("ddp_outside", of=of, no_sync=True) for of in DDP if of != "static"),
        *(training("ddp_outside", zero=True, engine=engine) for engine in ("aten", "onnxruntime")),
    ]
)
# A whole model around sharded ones is parted at them; of blocks there is a graph each.
BY_BLOCKS = ("blocks_then_sharded", "wrapped_blocks_then_sharded")
ORDERS = named([training(way.__name__) for way in OF_FSDP])
SHARDED = named(
    [
        *(
            training(way, of=of)
            for way, of in itertools.product(
                ("blocks_then_sharded", "sharded_then_whole", "wrapped_then_root_sharded"),
                sorted(SETTINGS.keys() - {"", *DDP}),
            )
        ),
        *(
            training(way, checkpoints=True, of=of)
            for way, of in itertools.product(
                (*BY_BLOCKS, "sharded_then_whole", "wrapped_then_root_sharded"), ("", "bf16")
            )
        ),
        training("blocks_then_sharded", engine="onnxruntime"),
        training("wrapped_then_root_sharded", engine="onnxruntime"),
    ]
)
OF_ONE = (*sorted(FAULTS.keys() - {"clock", "backwards"}), *OF_DATA)
AROUND = named(
    [
        *(training("sharded_then_whole", fault=fault) for fault in OF_ONE),
        *(
            training("ddp_outside", fault=fault, exchanges=True)
            for fault in ("", "second conversion", "steps", "break", "backwards")
        ),
    ]
)
FAULTY = named(
    [
        training(way, fault=fault)
        for way, fault in itertools.product(("ddp_outside", "blocks_then_sharded"), OF_ONE)
    ]
    + [training("ddp_outside", fault="backwards")]
    + [
        training(way, fault=fault, engine="auto", steps=24)
        for way in ("ddp_outside", "sharded_then_whole")
        for fault in ("clock", "no graph", "rows")
    ]
)
GROUPS = {
    "ways": WAYS,
    "replicated": REPLICATED,
    "orders": ORDERS,
    "sharded": SHARDED,
    "around": AROUND,
    "faulty": FAULTY,
}
MORE = {"replicated", "sharded", "faulty"}


def of(*groups: str) -> list[Any]:
    """The trainings of some groups; those of the breadth are launched with it alone."""
    return [
        pytest.param(group, name, marks=[pytest.mark.breadth] if group in MORE else [])
        for group in groups
        for name in GROUPS[group]
    ]


def launched(folder: Path, runs: dict[str, dict[str, Any]], world: int = 2) -> dict[str, Any]:
    results = launch(PROCESS, folder, world, [*runs.values()], timeout=390)
    return dict(zip(runs, results, strict=True))


Results = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What the trainings of a group came to, all in the same two processes."""

    @functools.cache
    def of_group(group: str) -> dict[str, Any]:
        return launched(tmp_path_factory.mktemp(group) / "run", GROUPS[group])

    return of_group


def expect_pytorchs(both: Any, run: dict[str, Any]) -> None:
    """Losses and weights are PyTorch's in each process."""
    # In bfloat16 one rounding is 2^-8.
    rtol = 2e-2 if run["of"] == "bf16" else 1e-6
    for plain, ours in both:
        assert ours["losses"] == pytest.approx(plain["losses"], rel=rtol, abs=rtol)
        torch.testing.assert_close(ours["weights"], plain["weights"], rtol=rtol, atol=10 * rtol)


@pytest.mark.parametrize(("group", "name"), of("ways", "replicated"))
def test_a_replicated_model_trains_as_in_pytorch(results: Results, group: str, name: str) -> None:
    both, run = results(group)[name], GROUPS[group][name]
    expect_pytorchs(both, run)
    for _, ours in both:
        if run["way"] in ("ddp_inside", "ddp_compiled"):
            assert ours["graphs"] == 0
            assert ["counts its own forwards" in reason for reason in ours["reasons"]] == [True]
        else:
            assert ours["graphs"] == ours["calls"] == run["steps"]
            assert ours["captures"] == 1


@pytest.mark.parametrize(("group", "name"), of("orders", "sharded"))
def test_a_sharded_model_trains_as_in_pytorch(results: Results, group: str, name: str) -> None:
    both, run = results(group)[name], GROUPS[group][name]
    expect_pytorchs(both, run)
    for _, ours in both:
        if run["way"] == "sharded_then_whole" and run["checkpoints"]:
            assert ours["graphs"] == 0  # Dynamo enters no checkpoint whose module gathers weights
            assert all(ours["reasons"])
        else:
            assert ours["graphs"] == ours["calls"] > 0


@pytest.mark.parametrize(("group", "name"), of("around", "faulty"))
def test_a_fault_in_one_process_changes_nothing_and_stops_none(
    results: Results, group: str, name: str
) -> None:
    both, run = results(group)[name], GROUPS[group][name]
    expect_pytorchs(both, run)
    (_, first), (_, last) = both
    if run["engine"] == "auto":
        assert 0 < first["graphs"] < first["calls"]  # PyTorch has turns in a contest
        # Its own clock says otherwise.
        assert run["fault"] == "no graph" or last["graphs"] > last["calls"] / 2
    else:
        assert first["graphs"] == first["calls"]
    if run["fault"] in ("no graph", "all conversions"):
        assert last["graphs"] == 0
        assert all(last["reasons"])


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """In one process and in two."""
    runs = {way: {"way": way} for way in ("padded", "early")}
    folder = tmp_path_factory.mktemp("others")
    return {world: launched(folder / str(world), runs, world) for world in (1, 2)}


def test_the_share_of_padding_that_is_left_out_is_that_of_one_process(
    others: dict[int, Any],
) -> None:
    one, two = others[1]["padded"], others[2]["padded"]
    for each in (one, two):
        assert each["losses"] == pytest.approx(each["plain"], rel=1e-6)
        assert each["graphs"] == each["left out"] == 4
    assert one["share"] == two["share"] > 0.2


def test_gradients_of_a_piece_are_exchanged_before_the_next_one_runs(
    others: dict[int, Any],
) -> None:
    for each in others.values():
        events = each["early"]
        assert events.count("piece") > 1
        assert "piece" in events[events.index("exchange") :]

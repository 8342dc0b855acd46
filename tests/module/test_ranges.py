"""What a profile says of ORTModule: where it captures, builds, and runs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from ortrain import Options, ORTModule
from ortrain.config import Engine
from ortrain.step.ranges import marked, profiled


def ranges(module: ORTModule, steps: int) -> Counter[str]:
    """How often each range of ORTModule is in the profile of so many steps."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(steps):
            module(torch.randn(3, 4)).sum().backward()
    names = [event.name for event in profile.events()]
    return Counter(n.removeprefix("ORTModule.") for n in names if n.startswith("ORTModule."))


@pytest.mark.parametrize("engine", ["onnxruntime", "aten"])
def test_a_profile_has_forwards_backwards_and_one_capture(engine: Engine) -> None:
    options = Options(engine=engine, fallback="raise")
    module = ORTModule(nn.Sequential(nn.Linear(4, 5), nn.Tanh()), options=options)
    found = ranges(module, 3)
    # The graph's backward runs once more to be compared with PyTorch's, and the module's as well.
    assert (found["forward"], found["backward"], found["capture"]) == (3, 5, 1)
    assert found["build"] >= 1
    assert ranges(module, 2) == {"forward": 2, "backward": 2}


def test_what_runs_in_pytorch_is_a_forward_too() -> None:
    module = ORTModule(nn.Linear(4, 2), options=Options(engine="torch"))
    assert ranges(module, 2) == {"forward": 2}


def test_without_a_profiler_nothing_is_marked() -> None:
    assert not profiled()
    with marked("forward") as range_:
        assert range_ is None

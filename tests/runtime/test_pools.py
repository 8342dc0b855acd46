"""What engines keep between steps is given back where another one has its turn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from ortrain import Options, ORTModule
from ortrain.frontend import machine
from ortrain.runtime import memory
from ortrain.runtime.memory import Ceiling, release_pools
from ortrain.runtime.onnxruntime import OnnxRuntimeExecutor
from tests.programs import program

MB = 1 << 20


@pytest.mark.skipif(not Ceiling.serves(), reason="the C library tells nothing of its memory")
def test_the_arena_gives_back_what_is_free() -> None:
    def body(op, x):
        wide = op.Expand(x, np.array([1 << 26]))  # 256 MiB
        return op.ReduceSum(op.Exp(wide), keepdims=0)

    compiled = OnnxRuntimeExecutor().compile(program(body, {"x": (1,)}))
    one = np.ones(1, np.float32)
    expected = compiled.run([one])[0]
    before = memory.resident()
    release_pools()
    assert memory.resident() < before - 200 * MB
    assert compiled.run([one])[0] == expected


def test_a_contest_gives_back_what_each_contestant_keeps(
    graph_wins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = []
    model = ORTModule(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), options=Options())
    monkeypatch.setattr(machine, "release_pools", lambda: released.append(model.report.mode))
    for _ in range(400):
        model(torch.randn(3, 4)).sum().backward()
        if model.report.contest.winner:
            break
    assert released[:2] == ["eager", "graph"]

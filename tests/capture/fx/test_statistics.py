"""Running statistics of a normalization, which a forward may read behind it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.kept.twins import Twins


class ReadsStatistics(nn.Module):
    """Normalizes, and adds what the statistics are by then."""

    def __init__(self, read: bool) -> None:
        super().__init__()
        self.first, self.norm, self.read = nn.Linear(4, 4), nn.BatchNorm1d(4), read

    def forward(self, x: Tensor) -> Any:
        y = self.norm(self.first(x))
        return y * (1 + self.norm.running_var.clone()) + self.norm.running_mean if self.read else y


def barriers(twins: Twins) -> int:
    """How many nodes of the graph stop gradients."""
    runner: Any = twins.graph._runner
    graph = runner.compiler.plan.programs[0].graph
    return sum(node.op_type == "StopGradient" for node in graph)


def test_statistics_that_are_read_behind_a_normalization_have_no_gradient() -> None:
    twins = Twins(ReadsStatistics(read=True), "aten")
    for rows in (5, 3, 6):
        twins.step(torch.randn(rows, 4, requires_grad=True))
    assert barriers(twins) == 2


def test_statistics_that_nobody_reads_have_no_barrier() -> None:
    twins = Twins(ReadsStatistics(read=False), "aten")
    twins.step(torch.randn(5, 4))
    assert barriers(twins) == 0

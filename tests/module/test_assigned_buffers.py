"""A graph that takes over after steps in PyTorch has the buffers that those have assigned."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule


class Running(nn.Module):
    """Assigns a buffer anew in each call, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("running", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        with torch.no_grad():
            self.running = self.running * 0.9 + x.mean(0) * 0.1
        return (x + self.running).square().mean()


@pytest.mark.usefixtures("graph_wins")
def test_a_graph_that_takes_over_reads_and_writes_the_buffer_of_now() -> None:
    eager = Running()
    ours = ORTModule(copy.deepcopy(eager), options=Options(certificate="off"))
    ours.steps_to_come = 10**6
    for step in range(130):
        x = torch.randn(3, 8) * (step + 1)
        losses = [model(x) for model in (eager, ours)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(ours.running, eager.running)
        torch.testing.assert_close(losses[1], losses[0])
    assert ours.report.graph_calls

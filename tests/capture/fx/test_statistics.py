"""Running statistics of a normalization, which a forward may read behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ortrain import Options, ORTModule
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


class Unread(nn.Module):
    """Normalizes in two layers what it does not return."""

    def __init__(self, norm: Callable[[], nn.Module], around: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.around = nn.Conv1d(4, 4, 1), around
        self.rest = nn.Sequential(norm(), nn.Conv1d(4, 4, 1), nn.Dropout(0.3), norm())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        self.around(self.rest, y)
        return y * torch.rand_like(y)


def without_gradients(layers: nn.Module, y: Tensor) -> None:
    with torch.no_grad():
        layers(y)


def under_autocast(layers: nn.Module, y: Tensor) -> None:
    with torch.autocast("cpu", enabled=False):
        layers(y)


def recomputed(layers: nn.Module, y: Tensor) -> None:
    checkpoint(layers, y, use_reentrant=False)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "over a batch": lambda: nn.BatchNorm1d(4),
    "averaged": lambda: nn.BatchNorm1d(4, momentum=None),
    "of instances": lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
}
AROUND: dict[str, Callable[..., Any]] = {
    "alone": lambda layers, y: layers(y),
    "without gradients": without_gradients,
    "under autocast": under_autocast,
    "recomputed": recomputed,
}


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_statistics_are_updated_by_a_normalization_that_nobody_reads(
    norm: Any, around: Any, engine: Any
) -> None:
    """The certificate compares them with PyTorch's, whose dropouts draw as many numbers."""
    model = ORTModule(
        Unread(norm, around), options=Options(engine=engine, fallback="raise", certificate=1)
    )
    running = {n: b for n, b in model.named_buffers() if "running" in n}
    before = {name: buffer.clone() for name, buffer in running.items()}
    for rows in (5, 3):
        model(torch.randn(rows, 4, 6)).sum().backward()
    assert not any(torch.equal(buffer, before[name]) for name, buffer in running.items())
    assert (model.report.captures, model.report.graph_calls) == (1, 2)

"""Parameters with random gradients, and what an Adam should make of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tests.optim import formulas
from tests.optim.formulas import Moments

# A step changes parameters of size 1 by 0.05, so that an error of a thousandth in a formula shows
# five hundred times. Ten steps in float32 round ten times.
TOLERANCE = 1e-6
SHAPES = [(5, 7), (33,), (), (0, 3), (2, 3, 4)]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def give_gradients(targets: Sequence[nn.Parameter]) -> None:
    for target in targets:
        # Some so small that eps, and where it is added, matters.
        target.grad = (torch.randn(target.shape) * 10.0 ** torch.randint(-6, 1, ())).to(target)


class Reference:
    """Follows groups of an optimizer in float64."""

    def __init__(self, optimizer: torch.optim.Optimizer, mode: int) -> None:
        self.mode = mode
        self.rows: list[list[Any]] = [
            [group, parameter, parameter.detach().double(), Moments()]
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]

    def step(self) -> None:
        names = ("betas", "eps", "weight_decay", "bias_correction")
        for row in self.rows:
            group, parameter, value, moments = row
            if parameter.grad is not None:
                options = {name: group[name] for name in names} | {"lr": float(group["lr"])}
                row[2] = formulas.adam(value, parameter.grad, moments, mode=self.mode, **options)

    def agrees(self, tolerance: float = TOLERANCE) -> None:
        for _, parameter, value, moments in self.rows:
            torch.testing.assert_close(
                parameter.detach().double(), value, rtol=tolerance, atol=tolerance
            )
            assert parameter.shape == moments.mean.shape or moments.step == 0

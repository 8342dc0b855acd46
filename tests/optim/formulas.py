"""The published updates, written plainly in float64 for one parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Moments:
    """What one parameter keeps between steps.

    Attributes:
        step: steps done.
        mean: of the gradients; 0 before the first.
        square: mean of their squares.
    """

    step: int = 0
    mean: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    square: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    def advance(self, gradient: Tensor, betas: tuple[float, float]) -> None:
        """Takes a gradient in."""
        self.step += 1
        self.mean = betas[0] * self.mean + (1 - betas[0]) * gradient
        self.square = betas[1] * self.square + (1 - betas[1]) * gradient * gradient

    def corrections(self, betas: tuple[float, float], wanted: bool) -> tuple[float, float]:
        """1 - beta^step for both betas, or 1 where none are wanted."""
        return (1 - betas[0] ** self.step, 1 - betas[1] ** self.step) if wanted else (1.0, 1.0)


def adam(
    parameter: Tensor,
    gradient: Tensor,
    moments: Moments,
    *,
    mode: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    bias_correction: bool,
) -> Tensor:
    """The updated parameter."""
    p, g = parameter.double(), gradient.double()
    if mode == 0:
        g = g + weight_decay * p
    moments.advance(g, betas)
    first, second = moments.corrections(betas, bias_correction)
    if mode == 2:
        p = p - lr * weight_decay * p
        return p - lr * moments.mean / (first * ((moments.square / second).sqrt() + eps))
    p = p - lr * math.sqrt(second) / first * moments.mean / (moments.square.sqrt() + eps)
    return p - lr * weight_decay * p if mode == 1 else p


def lamb(
    parameter: Tensor,
    gradient: Tensor,
    moments: Moments,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    ratio_min: float,
    ratio_max: float,
    bias_correction: bool,
) -> Tensor:
    """The updated parameter; ``gradient`` is divided already."""
    p = parameter.double()
    moments.advance(gradient.double(), betas)
    first, second = moments.corrections(betas, bias_correction)
    r = (moments.mean / first) / ((moments.square / second).sqrt() + eps) + weight_decay * p
    ratio = 1.0
    if p.norm() != 0 and r.norm() != 0:
        ratio = min(max(float(p.norm() / r.norm()), ratio_min), ratio_max)
    return p - lr * ratio * r


def sgd(
    parameter: Tensor,
    gradient: Tensor,
    buffer: Tensor | None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
) -> tuple[Tensor, Tensor]:
    """The updated parameter and momentum."""
    g = gradient.double() + weight_decay * parameter.double()
    buffer = g if buffer is None else momentum * buffer + (1 - dampening) * g
    direction = g + momentum * buffer if nesterov else buffer if momentum else g
    return parameter.double() - lr * direction, buffer

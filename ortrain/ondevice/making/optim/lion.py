"""Lion; Chen et al. 2023 (arXiv:2302.06675)."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ortrain.graph.build import Builder
from ortrain.ondevice.making.optim.base import Optimizer, Rule, States, check_betas

MEAN = "exp_avg"

# Carries every float32 that is not subnormal beyond 1.
_HUGE = 3e38


@dataclass(frozen=True, kw_only=True)
class Lion(Optimizer):
    """Steps by the sign of a moving average; half the state of Adam.

    A parameter p with gradient g and average m becomes ::

        p = p - lr (sign(beta1 m + (1 - beta1) g) + decay p)
        m = beta2 m + (1 - beta2) g

    Attributes:
        betas: decay of the average that the sign is taken of, and of the one that is kept.
        weight_decay: rate; shrinks the parameters, as that of AdamW.
        max_norm: largest 2-norm of all gradients together; None for no clipping.
        groups: what parameters of some names have of their own.

    Raises:
        ValueError: a hyperparameter is out of its range.
    """

    betas: tuple[float, float] = (0.9, 0.99)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_betas(self.betas)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The moving average of gradients."""
        return (MEAN,)

    def rule(
        self, op: Builder, learning_rate: ir.Value, step: ir.Value, weight_decay: float
    ) -> Rule:
        """The update of a group of parameters."""
        decay = learning_rate * weight_decay if weight_decay else None
        return _LionRule(betas=self.betas, rate=learning_rate, decay=decay)


@dataclass(frozen=True, kw_only=True)
class _LionRule(Rule):
    betas: tuple[float, float]
    rate: ir.Value
    decay: ir.Value | None

    def direction(
        self, op: Builder, p: ir.Value, g: ir.Value, states: States
    ) -> tuple[ir.Value, States]:
        change = g - states[MEAN]
        m = states[MEAN] + change * (1 - self.betas[1])
        # beta1 m + (1 - beta1) g of the m before, read off the one after: the old one's memory may
        # be gone by now.
        average = m + change * (self.betas[1] - self.betas[0])
        # onnxruntime's Sign takes nine times as long as a product does.
        d = op.Clip(average * _HUGE, -1.0, 1.0) * self.rate
        return (d if self.decay is None else d + p * self.decay), {MEAN: m}

"""Stochastic gradient descent, with momentum or without."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ortrain.graph.build import Builder
from ortrain.kinds import expect_flag, expect_number
from ortrain.ondevice.making.optim.base import Optimizer, Rule, States, check

MOMENTUM = "momentum_buffer"


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """``torch.optim.SGD``.

    Attributes:
        momentum: decay of the sum of gradients; 0 keeps no state.
        dampening: 1 less the weight of a gradient in the sum, from the second step on.
        nesterov: whether to look one step ahead.
        weight_decay: added to the gradient, times the parameter.
        max_norm: largest 2-norm of all gradients together; None for no clipping.
        groups: what parameters of some names have of their own.

    Raises:
        ValueError: a hyperparameter is out of its range, or ``nesterov`` without momentum or with
            dampening.
    """

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check("momentum", self.momentum)
        expect_number("dampening", self.dampening)
        expect_flag("nesterov", self.nesterov)
        if self.nesterov and (not self.momentum or self.dampening):
            raise ValueError(
                "nesterov needs a momentum above 0 and a dampening of 0, and these are "
                f"momentum={self.momentum}, dampening={self.dampening}"
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The sum of gradients, where there is momentum."""
        return (MOMENTUM,) if self.momentum else ()

    def rule(
        self, op: Builder, learning_rate: ir.Value, step: ir.Value, weight_decay: float
    ) -> Rule:
        """The update of a group of parameters."""
        share: ir.Value | None = None
        if self.momentum and self.dampening:
            share = op.Where(op.Equal(step, 0), np.float32(1.0), np.float32(1.0 - self.dampening))
        return _SGDRule(
            rate=learning_rate,
            momentum=self.momentum,
            nesterov=self.nesterov,
            l2=weight_decay,
            share=share,
        )


@dataclass(frozen=True, kw_only=True)
class _SGDRule(Rule):
    rate: ir.Value
    momentum: float
    nesterov: bool
    l2: float
    share: ir.Value | None

    def direction(
        self, op: Builder, p: ir.Value, g: ir.Value, states: States
    ) -> tuple[ir.Value, States]:
        if self.l2:
            g = g + p * self.l2
        if not self.momentum:
            return g * self.rate, {}
        b = states[MOMENTUM] * self.momentum + (g if self.share is None else g * self.share)
        return (g + b * self.momentum if self.nesterov else b) * self.rate, {MOMENTUM: b}

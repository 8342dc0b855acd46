"""Adam and AdamW; Kingma and Ba 2014 (arXiv:1412.6980), Loshchilov and Hutter 2017 (1711.05101)."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ortrain.graph.build import Builder
from ortrain.kinds import expect_flag
from ortrain.ondevice.making.optim.base import Optimizer, Rule, States, check, check_betas
from ortrain.ondevice.making.optim.phrases import one_minus_power, towards

MEAN, SQUARE = "exp_avg", "exp_avg_sq"


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """``torch.optim.Adam``: weight decay is added to the gradient.

    Attributes:
        betas: decay of the two moments.
        eps: added to the denominator.
        weight_decay: rate.
        bias_correction: whether the first steps are corrected for moments that start at zero.
        max_norm: largest 2-norm of all gradients together; None for no clipping.
        groups: what parameters of some names have of their own.

    Raises:
        ValueError: a hyperparameter is out of its range.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    bias_correction: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_betas(self.betas)
        check("eps", self.eps)
        expect_flag("bias_correction", self.bias_correction)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The moving averages of gradients and of their squares."""
        return (MEAN, SQUARE)

    def rule(
        self, op: Builder, learning_rate: ir.Value, step: ir.Value, weight_decay: float
    ) -> Rule:
        """The update of a group of parameters."""
        rate, eps = self._corrected(op, learning_rate, step)
        return _AdamRule(betas=self.betas, rate=rate, eps=eps, l2=weight_decay)

    def _corrected(
        self, op: Builder, learning_rate: ir.Value, step: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        """The rate and the eps that make both corrections: nothing is left for the elements.

        With c1 = 1 - beta1^t and c2 = 1 - beta2^t at step t from 1 on ::

            lr m / c1 / (sqrt(v / c2) + eps) = lr sqrt(c2) / c1 m / (sqrt(v) + eps sqrt(c2))
        """
        if not self.bias_correction:
            return learning_rate, op.constant([self.eps], ir.DataType.FLOAT)
        count = op.Cast(step + 1, to=int(ir.DataType.FLOAT))
        c1, c2 = (one_minus_power(op, beta, count) for beta in self.betas)
        root: ir.Value = op.Sqrt(c2)
        return learning_rate * root / c1, root * self.eps


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """``torch.optim.AdamW``: weight decay shrinks the parameters, and is no part of the moments.

    Attributes:
        betas: decay of the two moments.
        eps: added to the denominator.
        weight_decay: rate.
        bias_correction: whether the first steps are corrected for moments that start at zero.
        max_norm: largest 2-norm of all gradients together; None for no clipping.
        groups: what parameters of some names have of their own.

    Raises:
        ValueError: a hyperparameter is out of its range.
    """

    weight_decay: float = 0.01

    def rule(
        self, op: Builder, learning_rate: ir.Value, step: ir.Value, weight_decay: float
    ) -> Rule:
        """The update of a group of parameters."""
        rate, eps = self._corrected(op, learning_rate, step)
        decay = learning_rate * weight_decay if weight_decay else None
        return _AdamRule(betas=self.betas, rate=rate, eps=eps, decay=decay)


@dataclass(frozen=True, kw_only=True)
class _AdamRule(Rule):
    betas: tuple[float, float]
    rate: ir.Value
    eps: ir.Value
    l2: float = 0.0
    decay: ir.Value | None = None

    def direction(
        self, op: Builder, p: ir.Value, g: ir.Value, states: States
    ) -> tuple[ir.Value, States]:
        if self.l2:
            g = g + p * self.l2
        # Of two operands, onnxruntime computes the one emitted later first. This one would leave
        # the cache before it is needed, so it is to be computed last: 3 % of the time.
        decay = None if self.decay is None else p * self.decay
        v = towards(states[SQUARE], g * g, 1 - self.betas[1])
        m = towards(states[MEAN], g, 1 - self.betas[0])
        d = m / (op.Sqrt(v) + self.eps) * self.rate
        return (d if decay is None else d + decay), {MEAN: m, SQUARE: v}

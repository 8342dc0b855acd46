"""What an optimizer is to be: its name, its attributes, and those of parameters by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum, unique
from typing import Any

from ortrain.classic.names import unknown
from ortrain.errors import InputError
from ortrain.kinds import expect, expect_flag, expect_names, expect_number

NAMES = ("AdamOptimizer", "LambOptimizer", "SGDOptimizer")


@unique
class DecayMode(IntEnum):
    """Whether the weights decay before they are updated, or afterwards."""

    BEFORE_WEIGHT_UPDATE = 0
    AFTER_WEIGHT_UPDATE = 1


class _OptimizerConfig:
    """An optimizer by description; the trainer makes it.

    Args:
        name: ``"AdamOptimizer"``, ``"LambOptimizer"`` or ``"SGDOptimizer"``.
        params: groups: dicts with ``"params"``, names of parameters, and attributes of their own.
            What a group does not say, and parameters of no group, have the defaults.
        defaults: attributes by name; ``"lr"``, the learning rate, is one of them.

    Raises:
        InputError: an unknown optimizer or attribute, a learning rate in a group, a parameter in
            two groups, or an attribute out of its range.
        TypeError: an argument is of another type.
    """

    def __init__(
        self, name: str, params: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
    ) -> None:
        if name not in NAMES:
            raise unknown("the optimizer", name, NAMES)
        expect("defaults", defaults, Mapping, "a dict with 'lr'")
        if "lr" not in defaults:
            raise InputError("defaults has no 'lr'", help="give the learning rate: {'lr': 1e-3}")
        expect("params", params, (list, tuple), "a list of groups")
        _check(defaults)
        self.name = name
        self.lr: float = defaults["lr"]
        self.base_lrs = [self.lr]
        self.defaults = dict(defaults)
        self.params: list[dict[str, Any]] = []
        placed: set[str] = set()
        for group in params:
            expect("params", group, Mapping, "a list of dicts, the groups")
            if "params" not in group:
                raise InputError(
                    "a group of params names no parameters",
                    help="write {'params': ['weight', …], 'alpha': …}",
                )
            expect_names("params", group["params"])
            own = {key: value for key, value in group.items() if key != "params"}
            if "lr" in own:
                raise InputError(
                    "a group of params has a learning rate of its own",
                    because="the learning rate is one for all parameters, by step",
                    help="give lr to the optimizer, and a schedule as options.lr_scheduler",
                )
            for key in own:
                if key not in defaults:
                    raise unknown(f"the attribute of {name}", key, sorted({*defaults} - {"lr"}))
            _check(own)
            if twice := placed.intersection(group["params"]):
                raise InputError(
                    f"the parameter {min(twice)!r} stands in two groups",
                    help="leave it out of one of them",
                )
            placed.update(group["params"])
            self.params.append({**self.defaults, **own, "params": list(group["params"])})

    def attributes_of(self, name: str) -> dict[str, Any]:
        """The attributes of a parameter, without its learning rate."""
        group = next((group for group in self.params if name in group["params"]), self.defaults)
        return {key: value for key, value in group.items() if key not in ("params", "lr")}


_FLAGS = frozenset({"do_bias_correction"})
_SIGNED = frozenset({"ratio_min", "ratio_max"})


def _check(attributes: Mapping[str, Any]) -> None:
    """Raises where an attribute is of another type or out of its range."""
    for name, value in attributes.items():
        if name in _FLAGS:
            expect_flag(name, value)
        elif name == "weight_decay_mode":
            if value not in [*DecayMode]:
                raise InputError(f"weight_decay_mode={value}: expected an AdamConfig.DecayMode")
        else:
            expect_number(name, value)
            if name not in _SIGNED and not value >= 0:
                raise InputError(f"{name}={value}: expected 0 or more")


class SGDConfig(_OptimizerConfig):
    """Stochastic gradient descent: ``p = p - lr g``. Its gradients are never clipped.

    Args:
        params: empty; all parameters have the same attributes.
        lr: learning rate.
    """

    def __init__(self, params: Sequence[Mapping[str, Any]] = (), lr: float = 0.001) -> None:
        if len(params):
            raise InputError(
                "params of SGDConfig is not empty",
                because="SGDOptimizer has no attributes that could differ",
                help="leave params out; frozen parameters stand in utils.frozen_weights",
            )
        super().__init__("SGDOptimizer", params, {"lr": lr})


class AdamConfig(_OptimizerConfig):
    """Adam with decoupled decay.

    With ``BEFORE_WEIGHT_UPDATE`` it is ``torch.optim.AdamW``, otherwise the AdamW of transformers.

    Args:
        params: groups of parameters with attributes of their own.
        lr: learning rate.
        alpha: decay of the first moment, beta1 elsewhere.
        beta: decay of the second moment, beta2 elsewhere.
        lambda_coef: rate of the weights' decay.
        epsilon: added to the denominator.
        max_norm_clip: norm of all gradients from which on they are scaled down.
        do_bias_correction: whether the moments are corrected for their first steps.
        weight_decay_mode: when the weights decay.
    """

    DecayMode = DecayMode

    def __init__(
        self,
        params: Sequence[Mapping[str, Any]] = (),
        lr: float = 0.001,
        alpha: float = 0.9,
        beta: float = 0.999,
        lambda_coef: float = 0.0,
        epsilon: float = 1e-8,
        max_norm_clip: float = 1.0,
        do_bias_correction: bool = True,
        weight_decay_mode: int = DecayMode.BEFORE_WEIGHT_UPDATE,
    ) -> None:
        self.alpha, self.beta, self.lambda_coef = alpha, beta, lambda_coef
        self.epsilon, self.max_norm_clip = epsilon, max_norm_clip
        self.do_bias_correction, self.weight_decay_mode = do_bias_correction, weight_decay_mode
        super().__init__("AdamOptimizer", params, {"lr": lr, **vars(self)})


class LambConfig(_OptimizerConfig):
    """LAMB (You et al. 2019, arXiv:1904.00962).

    Args:
        params: groups of parameters with attributes of their own.
        lr: learning rate.
        alpha: decay of the first moment, beta1 elsewhere.
        beta: decay of the second moment, beta2 elsewhere.
        lambda_coef: rate of the weights' decay.
        ratio_min: lower bound of the ratio of a parameter's norm and its direction's.
        ratio_max: upper bound of it.
        epsilon: added to the denominator.
        max_norm_clip: norm of all gradients from which on they are scaled down.
        do_bias_correction: whether the moments are corrected for their first steps.
    """

    def __init__(
        self,
        params: Sequence[Mapping[str, Any]] = (),
        lr: float = 0.001,
        alpha: float = 0.9,
        beta: float = 0.999,
        lambda_coef: float = 0.0,
        ratio_min: float = -math.inf,
        ratio_max: float = math.inf,
        epsilon: float = 1e-6,
        max_norm_clip: float = 1.0,
        do_bias_correction: bool = False,
    ) -> None:
        self.alpha, self.beta, self.lambda_coef = alpha, beta, lambda_coef
        self.ratio_min, self.ratio_max, self.epsilon = ratio_min, ratio_max, epsilon
        self.max_norm_clip, self.do_bias_correction = max_norm_clip, do_bias_correction
        super().__init__("LambOptimizer", params, {"lr": lr, **vars(self)})


__all__ = ["NAMES", "AdamConfig", "DecayMode", "LambConfig", "SGDConfig", "_OptimizerConfig"]

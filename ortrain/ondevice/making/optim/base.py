"""What all optimizers share: clipping, groups of parameters, and the form of an update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import onnx_ir as ir

from ortrain.graph.build import Builder
from ortrain.kinds import NONE, expect, expect_number, expect_pair

States = dict[str, ir.Value]


@dataclass(frozen=True, kw_only=True)
class Group:
    """What some parameters have of their own.

    Attributes:
        weight_decay: in place of the optimizer's, which None keeps.
        lr_scale: by which the learning rate is multiplied.

    Raises:
        ValueError: one of them is negative.
    """

    weight_decay: float | None = None
    lr_scale: float = 1.0

    def __post_init__(self) -> None:
        check("weight_decay", 0.0 if self.weight_decay is None else self.weight_decay)
        check("lr_scale", self.lr_scale)


class Rule(ABC):
    """One update of one group of parameters, with all that their elements share."""

    @abstractmethod
    def direction(
        self, op: Builder, p: ir.Value, g: ir.Value, states: States
    ) -> tuple[ir.Value, States]:
        """What is subtracted from the parameter, and the next states.

        Every element is treated by itself, so that any part of a tensor may be updated alone.

        Args:
            op: emits the update, and takes the values as operands.
            p: parameter.
            g: gradient.
            states: by kind.
        """


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """Base of the optimizers.

    The learning rate is no part of it: it is an input of each update, so that a schedule is the
    training loop's own.

    Attributes:
        max_norm: all gradients together are scaled to at most this 2-norm, as by
            ``torch.nn.utils.clip_grad_norm_``; None for no clipping.
        groups: pattern of parameters' names (of :mod:`fnmatch`: ``*.bias``) → what these have of
            their own. The first pattern that fits a name counts.
    """

    max_norm: float | None = None
    groups: Mapping[str, Group] = field(default_factory=dict)

    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check("weight_decay", self.weight_decay)
        expect_number("max_norm", self.max_norm, NONE, expected="a number or None")
        expect("groups", self.groups, Mapping, "patterns of names, each with a Group")
        if self.max_norm is not None and not self.max_norm > 0:
            raise ValueError(f"max_norm must be above 0, and is {self.max_norm}")
        for pattern, group in self.groups.items():
            if not isinstance(group, Group):
                raise TypeError(f"groups[{pattern!r}] must be a Group, and is {group!r}")

    @property
    @abstractmethod
    def kinds(self) -> tuple[str, ...]:
        """The states that each parameter has, of its dtype; all start at zero."""

    @abstractmethod
    def rule(
        self, op: Builder, learning_rate: ir.Value, step: ir.Value, weight_decay: float
    ) -> Rule:
        """The update of a group of parameters.

        Args:
            op: emits what all elements share.
            learning_rate: float32 [1], of the group.
            step: int64 [1]; updates done before this one.
            weight_decay: of the group.
        """

    def group(self, name: str) -> Group:
        """The group of a parameter, with its weight decay filled in."""
        for pattern, group in self.groups.items():
            if fnmatchcase(name, pattern):
                if group.weight_decay is None:
                    return Group(weight_decay=self.weight_decay, lr_scale=group.lr_scale)
                return group
        return Group(weight_decay=self.weight_decay)


def check(name: str, value: float, below: float = float("inf")) -> None:
    """Raises ValueError where a hyperparameter is not in [0, below), TypeError for no number."""
    expect_number(name, value)
    if not 0.0 <= value < below:
        limit = "" if below == float("inf") else f" and below {below:g}"
        raise ValueError(f"{name} must be at least 0{limit}, and is {value}")


def check_betas(betas: tuple[float, float]) -> None:
    """Raises ValueError where a decay of a moment is not in [0, 1), TypeError for no pair."""
    expect_pair("betas", betas)
    for index, beta in enumerate(betas):
        check(f"betas[{index}]", beta, below=1.0)

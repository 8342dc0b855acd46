"""Optimizers by the names and attributes of 2020, on `ortrain.optim`'s."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ortrain.classic.names import unknown
from ortrain.classic.optim.config import NAMES, DecayMode, _check
from ortrain.errors import InputError, listing
from ortrain.kinds import expect
from ortrain.optim import SGD, AdamWMode, FusedAdam, Lamb
from ortrain.optim.clip import total_norm

# The attributes with their defaults: for parameters of which a script says nothing. What built
# the original's LAMB node wrote 0 for a correction that nobody asked for, where the operator's own
# schema has 1: so both generations have the same default.
_MOMENTS: dict[str, float] = {
    "alpha": 0.9,
    "beta": 0.999,
    "lambda": 0.0,
    "max_norm_clip": 1.0,
    "do_bias_correction": 1,
}
ATTRIBUTES: dict[str, dict[str, float]] = {
    "AdamOptimizer": {**_MOMENTS, "epsilon": 1e-8, "weight_decay_mode": 0},
    "LambOptimizer": {
        **_MOMENTS,
        "do_bias_correction": 0,
        "epsilon": 1e-6,
        "ratio_min": -math.inf,
        "ratio_max": math.inf,
    },
    "SGDOptimizer": {},
}
# Of the second generation, in which the first one's is a word of Python.
_SYNONYMS = {"lambda_coef": "lambda"}
_MODES = {
    DecayMode.BEFORE_WEIGHT_UPDATE: AdamWMode.ADAMW_TORCH,
    DecayMode.AFTER_WEIGHT_UPDATE: AdamWMode.ADAMW_TRANSFORMERS,
}


Rows = list[tuple[dict[str, float], list[torch.nn.Parameter]]]


def grouped(
    name: str,
    parameters: Mapping[str, torch.nn.Parameter],
    attributes: Callable[[str], Mapping[str, Any]],
) -> Rows:
    """Parameters of the same attributes, with these.

    Args:
        name: ``"AdamOptimizer"``, ``"LambOptimizer"`` or ``"SGDOptimizer"``.
        parameters: to train, by name.
        attributes: those of a parameter, by its name; what it leaves out has the default.

    Raises:
        InputError: an unknown optimizer or attribute, or a value out of its range.
        TypeError: a value of another type.
    """
    if name not in NAMES:
        raise unknown("the optimizer", name, NAMES)
    found: dict[tuple[tuple[str, float], ...], list[torch.nn.Parameter]] = {}
    for weight, parameter in parameters.items():
        own = attributes_of(name, weight, attributes(weight))
        found.setdefault(tuple(sorted(own.items())), []).append(parameter)
    rows = [(dict(key), members) for key, members in found.items()]
    modes = {row.get("weight_decay_mode", 0) for row, _ in rows}
    if len(modes) > 1:
        raise InputError(
            f"weight_decay_mode differs among parameters: {listing(sorted(map(str, modes)))}",
            help="give all of them the same",
        )
    return rows


class Update:
    """Changes parameters by their gradients, once a step has gathered them.

    Args:
        name: of the optimizer.
        parameters: to train, by name, where they are to stay.
        rows: the same in groups, with their attributes.
        clip: whether gradients are scaled down by their norm; those of SGD never are.
        partitioned: whether each process of the group keeps the moments of its own share of the
            parameters (ZeRO, stage 1).

    Attributes:
        optimizer: what updates; of a share of the parameters where it is partitioned.
    """

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, torch.nn.Parameter],
        rows: Rows,
        *,
        clip: bool,
        partitioned: bool,
    ) -> None:
        self.name, self.parameters = name, dict(parameters)
        self.clips = [row.get("max_norm_clip") if clip else None for row, _ in rows]
        kind, options = _kind(name, [row for row, _ in rows])
        groups = [{"params": members, **_hyperparameters(name, row)} for row, members in rows]
        if partitioned:
            whole = _zero()(groups, optimizer_class=kind, lr=0.0, **options)
            self.whole: torch.optim.Optimizer = whole
            self.optimizer: torch.optim.Optimizer = whole.optim
        else:
            self.whole = self.optimizer = kind(groups, lr=0.0, **options)

    def __call__(self, lr: float, divisor: float, *, checked: bool) -> bool:
        """Divides the gradients, clips them and updates the parameters.

        Args:
            lr: learning rate.
            divisor: of the sums of gradients, above 0.
            checked: whether nothing is updated where a gradient is not finite.

        Returns:
            Whether the parameters were updated.
        """
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if not gradients:
            return True
        clips = [clip for clip in self.clips if clip is not None]
        norm = total_norm(gradients) if clips or checked else None
        if norm is not None:
            norm = (norm.float() if norm.dtype.itemsize < 4 else norm) / divisor
        if checked and norm is not None and not norm.isfinite():
            return False
        for group, clip in zip(self.whole.param_groups, self.clips, strict=True):
            group["lr"] = lr
            own = [p.grad for p in group["params"] if p.grad is not None]
            factor = _factor(norm, clip, divisor)
            if own and not (isinstance(factor, float) and factor == 1.0):
                torch._foreach_mul_(own, factor)
        self.whole.step()
        return True


def _zero() -> Any:
    """The optimizer of torch of which each process has a share; the import warns of its own age."""
    with warnings.catch_warnings(action="ignore"):
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer


def attributes_of(name: str, weight: str, given: Mapping[str, Any] | None) -> dict[str, float]:
    """All attributes of a parameter.

    Args:
        name: of the optimizer.
        weight: name of the parameter, for the message.
        given: those that differ from the defaults.

    Raises:
        InputError: an unknown attribute, or a value out of its range.
        TypeError: a value of another type.
    """
    known = ATTRIBUTES[name]
    expect(f"the attributes of {weight!r}", {} if given is None else given, Mapping, "a dict")
    own = {_SYNONYMS.get(key, key): value for key, value in (given or {}).items()}
    for key in own:
        if key not in known:
            raise unknown(f"for {weight!r}, the attribute of {name}", key, [*known])
    try:
        _check(own)
    except InputError as error:
        raise error.at(f"the attributes of {weight!r}") from None
    return {**known, **own}


def _kind(name: str, rows: list[dict[str, float]]) -> tuple[Any, dict[str, Any]]:
    """The class of the optimizer, and what all of its groups have in common."""
    if name == "SGDOptimizer":
        return SGD, {}
    if name == "LambOptimizer":
        return Lamb, {"max_norm_clip": None}  # by a norm over all processes' shares: see Update
    mode = DecayMode(int(rows[0]["weight_decay_mode"]))
    return FusedAdam, {"adam_w_mode": _MODES[mode]}


def _hyperparameters(name: str, row: Mapping[str, float]) -> dict[str, Any]:
    """A group in torch's words."""
    if name == "SGDOptimizer":
        return {}
    group: dict[str, Any] = {
        "betas": (row["alpha"], row["beta"]),
        "eps": row["epsilon"],
        "weight_decay": row["lambda"],
        "bias_correction": bool(row["do_bias_correction"]),
    }
    if name == "LambOptimizer":
        group |= {"ratio_min": row["ratio_min"], "ratio_max": row["ratio_max"]}
    return group


def _factor(norm: torch.Tensor | None, clip: float | None, divisor: float) -> float | torch.Tensor:
    """What gradients are multiplied by; a tensor where looking at the norm would wait for it."""
    if norm is None or clip is None:
        return 1.0 / divisor
    if norm.is_cpu:
        length = norm.item()
        return (clip / length if length > clip else 1.0) / divisor
    return torch.where(norm > clip, clip / norm, 1.0) / divisor


__all__ = ["ATTRIBUTES", "Update", "attributes_of", "grouped"]

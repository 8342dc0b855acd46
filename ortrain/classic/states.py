"""Weights and moments by the names of 2020.

The first generation has one flat dict: a weight under its name, and ``Moment_1_<weight>``,
``Moment_2_<weight>`` and ``Update_Count_<weight>`` (Adam) or ``Step`` (LAMB, one for all). The
second generation has nested ones: ``{"Moment_1": …, "Moment_2": …, "Update_Count": …}`` by weight,
and ``{"Step": …}`` under ``shared_optimizer_state``. Both count updates from 1 on: a count is the
number of the update that comes next.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ortrain.classic.updates import Update
from ortrain.errors import InputError, listing

SHARED = "shared_optimizer_state"
_MOMENTS = {"Moment_1": "exp_avg", "Moment_2": "exp_avg_sq"}
_STATES = (*_MOMENTS, "Update_Count")
# A part of a weight or moment that ZeRO has cut flat, in the order of the parts.
_PART = re.compile(r"(.*)_view_(\d+)$")

States = dict[str, dict[str, torch.Tensor]]


def states_of(update: Update) -> States:
    """The optimizer's states in the nested form, on the CPU; of this process' share of them.

    A parameter that no update has reached has zeros.
    """
    if update.name == "SGDOptimizer":
        return {}
    found: States = {}
    names = {parameter: name for name, parameter in update.parameters.items()}
    steps = [1]
    for group in update.optimizer.param_groups:
        for parameter in group["params"]:
            own = update.optimizer.state.get(parameter, {})
            row = {
                old: own[new].detach().cpu().clone()
                if new in own
                else torch.zeros_like(parameter, device="cpu").detach()
                for old, new in _MOMENTS.items()
            }
            count = int(own["step"]) + 1 if "step" in own else 1
            steps.append(count)
            if update.name == "AdamOptimizer":
                row["Update_Count"] = torch.tensor([count])
            found[names[parameter]] = row
    found = {name: found[name] for name in update.parameters if name in found}
    if update.name == "LambOptimizer":
        found[SHARED] = {"Step": torch.tensor([max(steps)])}
    return found


def ready_states(
    update: Update, states: Mapping[str, Mapping[str, Any]], *, strict: bool
) -> Callable[[], None]:
    """Makes states in the nested form ready; parameters that they do not name keep theirs.

    Args:
        update: whose optimizer takes them.
        states: of a trainer with the same optimizer.
        strict: whether every parameter has to be there, and no other name.

    Returns:
        What takes them over.

    Raises:
        InputError: other names where they are checked, a moment of another shape, or states of
            another optimizer.
    """
    shared = states.get(SHARED, {})
    steps = [value for key, value in shared.items() if key.lower() == "step"]
    own = {name: row for name, row in states.items() if name != SHARED}
    groups = {p: group for group in update.optimizer.param_groups for p in group["params"]}
    if strict and update.name != "SGDOptimizer":
        # Those of another process' share may be there, and need not.
        share = {name: p for name, p in update.parameters.items() if p in groups}
        foreign = {name for name in update.parameters if name not in share}
        expect_same("optimizer", share, {n: row for n, row in own.items() if n not in foreign})
    ready = []
    for name, row in own.items():
        if name not in update.parameters:
            continue
        parameter = update.parameters[name]
        counts = [row["Update_Count"]] if "Update_Count" in row else steps
        missing = [key for key in _MOMENTS if key not in row]
        if update.name == "SGDOptimizer" or missing or not counts:
            raise InputError(
                f"the checkpoint's states of {name!r} are not those of {update.name}",
                because=f"it has {listing([*row, *shared]) or 'none'}",
                help="load it with the optimizer that has written it, or without its states",
            )
        moments = {
            new: _like(row[old], parameter, f"{old} of {name!r}") for old, new in _MOMENTS.items()
        }
        ready.append((parameter, moments, int(np.asarray(counts[0]).reshape(-1)[0]) - 1))

    def take() -> None:
        for parameter, moments, step in ready:
            if parameter not in groups:
                continue  # of another process
            state = update.optimizer.state[parameter]
            device = _step_device(update, groups[parameter]) or parameter.device
            state.update(moments)
            state["step"] = torch.tensor(float(step), dtype=torch.float32).to(device)

    return take


def _step_device(update: Update, group: Mapping[str, Any]) -> torch.device | None:
    """Where the count of a parameter lies; None beside the parameter."""
    in_torch_mode = getattr(update.optimizer, "_adam_w_mode", None) == 2
    by_step = update.name == "AdamOptimizer" and group["bias_correction"] and not in_torch_mode
    return torch.device("cpu") if by_step else None


def ready_weights(
    weights: Mapping[str, torch.Tensor], state: Mapping[str, Any], *, strict: bool
) -> Callable[[], None]:
    """Makes values ready for tensors of the same names.

    Args:
        weights: tensors of the model, by all names that they have.
        state: values by name: arrays or tensors.
        strict: whether all have to be there, and no others.

    Returns:
        What copies them into the tensors.

    Raises:
        InputError: other names where they are checked, or a value of another shape.
    """
    if strict:
        present = [name for name in weights if name in state]
        expect_same("model", dict.fromkeys([*lacking(weights, state), *present]), state)
    ready = [
        (weights[name], _like(value, weights[name], repr(name)))
        for name, value in state.items()
        if name in weights
    ]

    @torch.no_grad()
    def take() -> None:
        for tensor, value in ready:
            tensor.copy_(value)

    return take


def lacking(weights: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> list[str]:
    """Names of the floating tensors that a state has under none of their names.

    Of a tensor with several names the original kept one, and none of those that count batches.

    Args:
        weights: tensors of the model, by all names that they have.
        state: values by name.
    """
    covered = {id(weights[name]) for name in state if name in weights}
    return [
        name
        for name, tensor in weights.items()
        if id(tensor) not in covered and tensor.is_floating_point()
    ]


def expect_same(what: str, expected: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raises where two sets of names differ.

    Raises:
        InputError: names are missing, or there are others.
    """
    missing = [name for name in expected if name not in given]
    others = [name for name in given if name not in expected]
    if missing or others:
        rows = [f"it lacks {listing(missing)}"] if missing else []
        rows += [f"it has {listing(others)} besides"] if others else []
        raise InputError(
            f"the checkpoint's {what} is not that of this trainer",
            because="; ".join(rows),
            help="strict=False takes over what has the same names",
        )


def _like(value: Any, tensor: torch.Tensor, what: str) -> torch.Tensor:
    """A value as a tensor of the shape, dtype, device and strides of another one."""
    found = value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
    if found.shape != tensor.shape:
        raise InputError(
            f"{what} has the shape {list(found.shape)} in the checkpoint, and here "
            f"{list(tensor.shape)}",
            help="load it into the model that it was saved of",
        )
    return torch.empty_like(tensor, requires_grad=False).copy_(found)


# -- the flat form ---------------------------------------------------------------------------------


def flat(weights: Mapping[str, torch.Tensor], states: States) -> dict[str, torch.Tensor]:
    """Weights and states in the flat form."""
    result = {name: tensor.detach().cpu().clone() for name, tensor in weights.items()}
    for name, row in states.items():
        if name == SHARED:
            result.update(row)
        else:
            result.update({f"{key}_{name}": value for key, value in row.items()})
    return result


def nested(
    state: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]
) -> tuple[dict[str, Any], States, list[str]]:
    """Weights and states of the flat form.

    Args:
        state: flat, of one process.
        shapes: of the model's weights, by name.

    Returns:
        Weights; states in the nested form; names that are neither.
    """
    weights: dict[str, Any] = {}
    states: States = {}
    others: list[str] = []
    for name, value in state.items():
        own = _own(name, shapes)
        if own is not None:
            weights[own] = value
        elif name in ("Step", "step"):
            states[SHARED] = {"Step": value}
        elif (found := _state(name, shapes)) is not None:
            key, weight = found
            states.setdefault(weight, {})[key] = value
        elif not (name.endswith("_fp16") and _own(name.removesuffix("_fp16"), shapes)):
            others.append(name)  # the copies in float16 follow from the weights
    return weights, states, others


def _own(name: str, shapes: Mapping[str, Sequence[int]]) -> str | None:
    """The model's name of a weight, which may have been saved inside a wrapper."""
    return next((n for n in (name, name.removeprefix("model_.")) if n in shapes), None)


def _state(name: str, shapes: Mapping[str, Sequence[int]]) -> tuple[str, str] | None:
    for key in _STATES:
        if name.startswith(f"{key}_"):
            own = _own(name.removeprefix(f"{key}_"), shapes)
            return None if own is None else (key, own)
    return None


def joined(
    files: Sequence[Mapping[str, Any]], shapes: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """The flat states of all processes as one.

    Args:
        files: of the processes, by rank.
        shapes: of the model's weights, by name.

    Raises:
        InputError: the parts of a weight do not make up a whole one, or processes disagree.
    """
    whole: dict[str, Any] = {}
    parts: dict[str, list[tuple[int, int, torch.Tensor]]] = {}
    for rank, state in enumerate(files):
        for name, value in state.items():
            cut = _PART.match(name)
            if cut is not None and not name.startswith("Update_Count_"):
                parts.setdefault(cut[1], []).append(
                    (rank, int(cut[2]), torch.as_tensor(value).reshape(-1))
                )
                continue
            name = cut[1] if cut is not None else name
            value = torch.as_tensor(value)
            if name in whole and not torch.equal(whole[name], value):
                raise InputError(
                    f"the processes of the checkpoint disagree on {name!r}",
                    help="take the files of one and the same step",
                )
            whole[name] = value
    for name, pieces in parts.items():
        if name.endswith("_fp16"):
            continue
        found = _state(name, shapes)
        weight = found[1] if found is not None else _own(name, shapes)
        if weight is None:
            continue
        ordered = torch.cat([piece for _, _, piece in sorted(pieces, key=lambda row: row[:2])])
        shape = shapes[weight]
        if ordered.numel() != int(np.prod(shape)):
            raise InputError(
                f"the parts of {name!r} have {ordered.numel()} elements, and the weight "
                f"{int(np.prod(shape))}",
                help="give the files of all processes",
            )
        whole[name] = ordered.reshape(tuple(shape))
    return whole


__all__ = [
    "SHARED",
    "States",
    "expect_same",
    "flat",
    "joined",
    "lacking",
    "nested",
    "ready_states",
    "ready_weights",
    "states_of",
]

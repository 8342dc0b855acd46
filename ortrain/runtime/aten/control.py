"""Control flow of running functions: branches and loops over functions that the writer wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Body = Callable[..., list[Tensor]]


def choose(condition: Tensor | bool, then: Body, otherwise: Body) -> list[Tensor]:
    """The results of one of two functions."""
    return then() if condition else otherwise()


def loop(
    body: Body,
    trips: int | None,
    condition: Tensor | bool | None,
    states: Sequence[Tensor],
    collected: int,
    *,
    asks: bool,
) -> list[Tensor]:
    """Repeats a function.

    Args:
        body: ``body(step, *states)`` returns whether to go on, if it ``asks``, the next states, and
            what to collect.
        trips: at most so many; None for no such bound.
        condition: whether to begin at all; None to begin.
        states: before the first step.
        collected: how many tensors each step adds.
        asks: whether the body says when to end.

    Returns:
        The states after the last step, and what was collected, stacked.

    Raises:
        ValueError: a step changes the rank of a state, which its code does not expect.
    """
    rows: list[Sequence[Tensor]] = []
    ranks = [state.dim() for state in states]
    goes_on = condition is None or bool(condition)
    while goes_on and (trips is None or len(rows) < trips):
        results = body(len(rows), *states)
        goes_on = bool(results.pop(0)) if asks else True
        states = results[: len(ranks)]
        if [state.dim() for state in states] != ranks:
            raise ValueError("a step of a loop changes the rank of a state")
        rows.append(results[len(ranks) :])
    if rows or not collected:
        return [*states, *(torch.stack(column) for column in zip(*rows, strict=True))]
    return [*states, *_none(body(0, *states)[-collected:])]


def scan(
    body: Body,
    states: Sequence[Tensor],
    slices: Sequence[Tensor],
    collected: int,
    *,
    axes: Sequence[int] = (),
    backwards: Sequence[int] = (),
    collected_axes: Sequence[int] = (),
    collected_backwards: Sequence[int] = (),
) -> list[Tensor]:
    """Runs a function over the slices of tensors.

    Args:
        body: ``body(*states, *slices)`` returns the next states, and what to collect.
        states: before the first step.
        slices: tensors that are cut along one axis each.
        collected: how many tensors each step adds.
        axes: of the cuts; the first by default.
        backwards: for each tensor whether the last slice comes first; none by default.
        collected_axes: along which what was collected is stacked; the first by default.
        collected_backwards: whether the first step's comes last; none by default.

    Returns:
        The states after the last step, and what was collected, stacked.
    """
    axes, collected_axes = axes or [0] * len(slices), collected_axes or [0] * collected
    columns = [x.unbind(axis) for x, axis in zip(slices, axes, strict=True)]
    for i, reverse in enumerate(backwards):
        if reverse:
            columns[i] = columns[i][::-1]
    count = len(states)
    rows = []
    for row in zip(*columns, strict=True):
        results = body(*states, *row)
        states = results[:count]
        rows.append(results[count:])
    if not collected:
        return [*states]
    if not rows:
        zeros = [_slice_of_zeros(x, axis) for x, axis in zip(slices, axes, strict=True)]
        empty = _none(body(*states, *zeros)[count:])
        return [*states, *(x.movedim(0, a) for x, a in zip(empty, collected_axes, strict=True))]
    stacks = [*zip(*rows, strict=True)]
    for i, reverse in enumerate(collected_backwards):
        if reverse:
            stacks[i] = stacks[i][::-1]
    return [*states, *map(torch.stack, stacks, collected_axes)]


def _slice_of_zeros(x: Tensor, axis: int) -> Tensor:
    return x.new_zeros([size for i, size in enumerate(x.shape) if i != axis % x.dim()])


def _none(rows: Sequence[Tensor]) -> list[Tensor]:
    """None of such rows; what a step would have given says their shapes."""
    return [row.new_empty((0, *row.shape)) for row in rows]

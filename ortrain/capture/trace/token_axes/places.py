"""Operators that move elements to other places, or show them in another shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy

from ortrain.capture.trace.closed_code import Unproved
from ortrain.capture.trace.token_axes.walk import (
    Axes,
    Labels,
    Size,
    Step,
    Walk,
    argument,
    axes_of,
    carries,
    expect_no_tokens,
    without_axes,
)


def _moved(own: Axes, step: Step, labels: Sequence[Labels]) -> list[Axes]:
    return [replace(own, sizes=step.sizes[0], labels=tuple(labels))]


@carries("permute")
def _permuted(walk: Walk, step: Step) -> list[Axes]:
    own = walk.of(step.args[0])
    return _moved(own, step, [own.labels[d] for d in axes_of(step.args[1], len(own.sizes))])


@carries("transpose t")
def _transposed(walk: Walk, step: Step) -> list[Axes]:
    own = walk.of(step.args[0])
    labels = [*own.labels]
    if labels and (step.name == "transpose" or len(labels) == 2):
        a, b = axes_of([*step.args[1:3]] if step.name == "transpose" else [0, 1], len(labels))
        labels[a], labels[b] = labels[b], labels[a]
    return _moved(own, step, labels)


@carries("unsqueeze")
def _unsqueezed(walk: Walk, step: Step) -> list[Axes]:
    own = walk.of(step.args[0])
    labels = [*own.labels]
    labels.insert(step.args[1] % (len(labels) + 1), ())
    return _moved(own, step, labels)


@carries("select")
def _selected(walk: Walk, step: Step) -> list[Axes]:
    own = walk.of(step.args[0])
    dim = step.args[1] % len(own.sizes)
    expect_no_tokens(own, [dim], step.name)
    return _moved(own, step, without_axes(own, [dim], keep=False))


@carries("slice")
def _sliced(walk: Walk, step: Step) -> list[Axes]:
    own = walk.of(step.args[0])
    expect_no_tokens(own, [argument(step, 1, "dim", 0) % len(own.sizes)], step.name)
    return _moved(own, step, own.labels)


@carries("split split_with_sizes unbind")
def _parts(walk: Walk, step: Step) -> list[Axes]:
    own = walk.of(step.args[0])
    dim = argument(step, 1 if step.name == "unbind" else 2, "dim", 0) % len(own.sizes)
    expect_no_tokens(own, [dim], step.name)
    labels = without_axes(own, [dim], keep=step.name != "unbind")
    return [replace(own, sizes=sizes, labels=labels) for sizes in step.sizes]


@carries("cat stack")
def _joined(walk: Walk, step: Step) -> list[Axes]:
    parts = [walk.of(each) for each in step.args[0]]
    labels = [*parts[0].labels]
    dim = argument(step, 1, "dim", 0) % (len(labels) + (step.name == "stack"))
    if any([*each.labels] != labels or each.total for each in parts):
        raise Unproved("axes of different tokens meet")
    if step.name == "stack":
        labels.insert(dim, ())
    else:
        expect_no_tokens(parts[0], [dim], step.name)
    return [Axes(step.sizes[0], tuple(labels), all(each.zero for each in parts))]


@carries("expand", sized=True)
def _expanded(walk: Walk, step: Step) -> list[Axes]:
    own, sizes = walk.of(step.args[0]), step.sizes[0]
    labels: list[Labels] = []
    for axis in range(-len(sizes), 0):
        inside = len(own.sizes) >= -axis
        if inside and own.sizes[axis] == sizes[axis]:
            labels.append(own.labels[axis])
        elif inside and own.sizes[axis] != 1:
            raise Unproved("expand has other sizes than expected")
        else:
            labels.extend(walk.made([sizes[axis]]))
    return _moved(own, step, labels)


@carries("view _unsafe_view reshape", sized=True)
def _viewed(walk: Walk, step: Step) -> list[Axes]:
    own = walk.of(step.args[0])
    if not isinstance(step.args[1], list | tuple):
        raise Unproved("a tensor is seen as one of another dtype")
    return _moved(own, step, _reshaped(walk, own, step.sizes[0]))


def _reshaped(walk: Walk, own: Axes, sizes: Sequence[Size]) -> list[Labels]:
    """Axes of tokens stay whole, or are put together with one another, or taken apart again."""
    atoms: list[Any] = []  # symbols and numbers, in the order in which they lie
    for size, labels in zip(own.sizes, own.labels, strict=True):
        if labels:
            atoms += labels
        elif size != 1:
            atoms.append(sympy.Integer(size))
    found: list[Labels] = []
    for size in sizes:
        if isinstance(size, int):
            atoms = _without(atoms, size)
            found.append(())
            continue
        rest, joined = size, list[int]()
        while rest != 1:
            if not atoms or not isinstance(atoms[0], int):
                raise Unproved("tokens are put together with something else")
            label = atoms.pop(0)
            rest = sympy.cancel(rest / walk.symbols[label])
            if (rest.is_number and rest != 1) or sympy.denom(rest) != 1:
                raise Unproved("tokens are put together with something else")
            joined.append(label)
        found.append(tuple(joined))
    if atoms:
        raise Unproved("tokens are put together with something else")
    return found


def _without(atoms: list[Any], size: int) -> list[Any]:
    """What is left behind an axis of so many places."""
    left = [*atoms]
    while size != 1:
        if not left or not isinstance(left[0], sympy.Integer):
            raise Unproved("tokens are put together with something else")
        head = int(left.pop(0))
        if head % size == 0:
            if head != size:
                left.insert(0, sympy.Integer(head // size))
            return left
        if size % head:
            raise Unproved("axes are put together in another way")
        size //= head
    return left

"""What is known of the axes of tensors, and how it goes through the steps of a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from ortrain.capture.trace.closed_code import Unproved

Labels = tuple[int, ...]
Size = Any  # a whole number, or an expression of symbols


@dataclass(frozen=True)
class Axes:
    """What is known of a tensor.

    Attributes:
        sizes: of it.
        labels: of each axis, the symbols whose places it has, one behind another; none where its
            size is a number.
        zero: whether it is zero at each token at which all gradients that arrive are.
        total: whether it is a sum over all tokens, or made of one.
    """

    sizes: tuple[Size, ...]
    labels: tuple[Labels, ...]
    zero: bool = False
    total: bool = False

    @property
    def tokens(self) -> list[int]:
        """The symbols of its axes."""
        return [symbol for labels in self.labels for symbol in labels]


@dataclass(frozen=True)
class Ref:
    """A tensor among the arguments of an operator, by its number in the trace."""

    number: int


@dataclass(frozen=True)
class Step:
    """A call of an operator: tensors are Refs, and sizes of the trace expressions."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int, ...]
    sizes: tuple[tuple[Size, ...], ...]

    @property
    def name(self) -> str:
        """Of the operator, without its overload."""
        return str(self.operator._schema.name).removeprefix("aten::")


class Walk:
    """Goes through the steps of a trace.

    Args:
        symbols: of the sizes; their places are their labels.
        known: number of a tensor → what is known of it.
    """

    def __init__(self, symbols: Sequence[Any], known: dict[int, Axes]) -> None:
        self.symbols, self.known = [*symbols], known

    def through(self, step: Step) -> None:
        """Notes what is known of a step's results.

        Raises:
            Unproved: it is not known to treat tokens alone.
        """
        name = step.name
        writes = step.operator._schema.is_mutable
        if writes and not (name.endswith("_") and len(step.results) == 1):
            raise Unproved(f"{name} writes")
        rule = RULES.get(name.removesuffix("_") if writes else name)
        if rule is None:
            raise Unproved(f"{name} may mix tokens")
        if name not in SIZED and any(map(is_size, leaves((step.args, step.kwargs)))):
            raise Unproved(f"{name} is given a number of tokens")
        found = rule(self, step)
        if len(found) != len(step.results):
            raise Unproved(f"{name} has other results than expected")
        for number, axes, sizes in zip(step.results, found, step.sizes, strict=True):
            if axes.sizes != sizes or len(axes.labels) != len(sizes):
                raise Unproved(f"{name} has other sizes than expected")
            if len({*axes.tokens}) != len(axes.tokens):
                raise Unproved(f"{name} has pairs of tokens")
            if axes.total and axes.tokens:
                raise Unproved(f"{name} gives a sum over tokens to each of them")
            self.known[number] = axes

    def of(self, value: Any) -> Axes:
        """What is known of an argument that is a tensor."""
        if not isinstance(value, Ref):
            raise Unproved("an argument is no tensor")
        return self.known[value.number]

    def made(self, sizes: Sequence[Size]) -> tuple[Labels, ...]:
        """The labels of a tensor that holds the same number everywhere."""
        return tuple(self._label(size) for size in sizes)

    def _label(self, size: Size) -> Labels:
        if isinstance(size, int):
            return ()
        factors = sympy.Mul.make_args(size)
        if not all(factor in self.symbols for factor in factors):
            raise Unproved(f"a size is {size}")
        return tuple(sorted(self.symbols.index(factor) for factor in factors))


def leaves(value: Any) -> list[Any]:
    """The values in lists and dictionaries, to any depth."""
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in leaves(each)]
    if isinstance(value, dict):
        return leaves([*value.values()])
    return [value]


def is_size(value: Any) -> bool:
    """Whether an argument is a number of tokens."""
    return isinstance(value, sympy.Basic)


def is_zero(value: Any) -> bool:
    """Whether an argument is the number zero."""
    return isinstance(value, bool | int | float) and value == 0


Rule = Callable[[Walk, Step], list[Axes]]
RULES: dict[str, Rule] = {}
SIZED: set[str] = set()


def carries(names: str, *, sized: bool = False) -> Callable[[Rule], Rule]:
    """Registers what is known of the results of some operators.

    Args:
        names: of the operators.
        sized: whether they may be given numbers of tokens.
    """

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), rule))
        if sized:
            SIZED.update(names.split())
        return rule

    return register


def broadcast(operands: Sequence[Axes], sizes: tuple[Size, ...]) -> tuple[Labels, ...]:
    """The labels of a result, axes counted from the last."""
    found: list[Labels] = []
    for axis in range(-len(sizes), 0):
        here = [(o.sizes[axis], o.labels[axis]) for o in operands if len(o.sizes) >= -axis]
        wanted = {labels for size, labels in here if size != 1}
        if len(wanted) > 1 or any(size not in (1, sizes[axis]) for size, _ in here):
            raise Unproved("axes of different tokens meet")
        found.append(wanted.pop() if wanted else ())
    return tuple(found)


def argument(step: Step, place: int, name: str, default: Any = None) -> Any:
    """By position or by keyword."""
    return step.args[place] if len(step.args) > place else step.kwargs.get(name, default)


def axes_of(given: Any, rank: int) -> list[int]:
    """Axes as numbers from 0; all where none are named."""
    if given is None or given == []:
        return list(range(rank))
    return [int(d) % rank for d in (given if isinstance(given, list | tuple) else [given])]


def without_axes(own: Axes, dims: Sequence[int], keep: bool) -> tuple[Labels, ...]:
    """The labels of what goes over some axes."""
    kept = [() if a in dims else labels for a, labels in enumerate(own.labels)]
    return tuple(kept if keep else [labels for a, labels in enumerate(kept) if a not in dims])


def expect_no_tokens(own: Axes, dims: Sequence[int], name: str) -> None:
    """Raises where an operator goes over an axis of tokens."""
    if any(own.labels[d] for d in dims):
        raise Unproved(f"{name} goes over tokens")

"""Windows of memory, ``as_strided``: what must hold for them to be rows of their tensor.

A graph has no memory, but that of a tensor without gaps is its numbers, in some order of its axes.
Whether it has none, and whether the windows stay inside, goes by sizes: what does not follow from
their terms is a condition on them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from ortrain.pytorch.conditions import Mod

aten = torch.ops.aten
WINDOWS = frozenset({aten.as_strided.default, aten.as_strided_copy.default})


@dataclass(frozen=True)
class Rows:
    """Windows as rows of numbers that lie one behind the other.

    Attributes:
        order: the axes of the tensor, from the one of the longest stride on.
        start: the first axis of the windows along which a row goes.
        conditions: on sizes, those that do not hold for every size.
    """

    order: tuple[int, ...]
    start: int
    conditions: tuple[sympy.Basic, ...]


def rows_of(node: fx.Node) -> Rows:
    """The rows of a node for ``as_strided``, as long as they can be."""
    value = node.args[0].meta["val"]  # type: ignore[union-attr]
    size, stride, *rest = node.args[1:]
    given: Any = size, stride
    sizes, strides = ([*map(_term, each)] for each in given)
    offset: Any = _term(rest[0] if rest and rest[0] is not None else 0)
    hints = _hints(value, node.args)
    own = [*zip(map(_term, value.shape), map(_term, value.stride()), strict=True)]
    order = sorted(range(len(own)), key=lambda axis: _known(own[axis][1], hints), reverse=True)
    shape, count = [own[axis][0] for axis in order], _product(size for size, _ in own)
    in_order = [
        sympy.Eq(own[axis][1], _product(shape[place + 1 :]))
        for place, axis in enumerate(order)
        if own[axis][0] != 1
    ]
    last = offset + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    begins = sympy.Eq(_term(value.storage_offset()), 0)
    ends = sympy.Ge(sympy.expand(count - 1 - last), 0)
    for start in range(1, len(sizes) + 1):
        length = _product(sizes[start:])
        axes = range(start, len(sizes))
        behind = [sympy.Eq(strides[axis], _product(sizes[axis + 1 :])) for axis in axes]
        whole = [_whole(term, length) for term in (count, offset, *strides[:start])]
        if start == len(sizes) or all(_true(each, hints) for each in (*behind, *whole)):
            break
    every = (*in_order, begins, ends, *behind, *whole)
    return Rows(tuple(order), start, tuple(each for each in every if not _follows(each)))


def _whole(term: sympy.Expr, length: sympy.Expr) -> sympy.Basic:
    """That a term is a multiple of a length."""
    quotient = sympy.fraction(sympy.together(sympy.expand(term / length)))[1]
    return sympy.true if quotient == 1 else sympy.Eq(Mod(term, length), 0)


def _follows(condition: sympy.Basic) -> bool:
    """Whether a condition holds for all sizes."""
    if isinstance(condition, sympy.Eq):
        return bool(sympy.expand(condition.lhs - condition.rhs) == 0)
    return condition == sympy.true


def _true(condition: sympy.Basic, hints: dict[Any, Any]) -> bool:
    """Whether a condition holds in the call that was traced."""
    return _follows(condition) or bool(condition.xreplace(hints) == sympy.true)


def _hints(value: torch.Tensor, arguments: Iterable[Any]) -> dict[Any, Any]:
    """The sizes of the call that was traced, by their symbols."""
    flat: list[Any] = []
    fx.node.map_arg(tuple(arguments), lambda node: flat.append(node.meta["val"]))
    numbers = [each for each in (*value.shape, *flat) if isinstance(each, torch.SymInt)]
    return dict(numbers[0].node.shape_env.backed_var_to_val) if numbers else {}


def _known(term: sympy.Expr, hints: dict[Any, Any]) -> float:
    """A size in the call that was traced; that of a value is not known, and larger than any."""
    found = term.xreplace(hints)
    return float(found) if found.is_number else float("inf")


def _term(size: Any) -> sympy.Expr:
    """A size as a term of the symbols of the trace."""
    size = size.meta["val"] if isinstance(size, fx.Node) else size
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _product(terms: Any) -> sympy.Expr:
    return sympy.prod(terms)

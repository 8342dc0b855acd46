"""What becomes of each decision of a trace: a condition, an assumption or a refusal.

A trace decides about sizes in many places, and each decision has one of three outcomes:

- a **condition** is evaluated for every new tuple of sizes;
- an **assumption** is that some size is neither 1 nor 0. PyTorch's operators take a 1 for a size
  that may be broadcast, and Python code may ask for it; a graph computes with it as with any other,
  and nearly always to the same result. Whoever uses a capture at such sizes compares it with the
  module once;
- anything else, a relation that no size of an input decides, refuses the capture.

An input's size of 0 is never accepted in the place of a larger one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from sympy.printing.precedence import PRECEDENCE
from torch.utils._sympy.printers import PythonPrinter

from ortrain.capture.trace.decisions import Decided
from ortrain.errors import CaptureError
from ortrain.guards.constraints import Condition, Constraints, Place, size_name

# A lower bound further up is a condition without a look at why it is there.
_LOWEST = 64


def constraints_of(
    names: Sequence[str], shapes: Sequence[Sequence[Any]], decided: Decided
) -> Constraints:
    """The outcome of everything that a trace has decided.

    Args:
        names: of the tensors.
        shapes: of the tensors, as ints and ``torch.SymInt``.
        decided: by the trace.

    Raises:
        CaptureError: a decision depends on something else than sizes of the inputs.
    """
    sizes: dict[Place, sympy.Expr] = {
        (i, axis): size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
        for i, shape in enumerate(shapes)
        for axis, size in enumerate(shape)
    }
    places: dict[sympy.Basic, Place] = {}
    for place, size in sizes.items():
        if size.is_Symbol:
            places.setdefault(size, place)
    words = _Python({symbol: size_name(names, place) for symbol, place in places.items()})
    python = _Python({symbol: _code(place) for symbol, place in places.items()})

    def condition(relation: sympy.Basic, where: str = "") -> Condition:
        if not relation.free_symbols <= places.keys():
            raise _undecidable(str(relation), where)
        return Condition(words.doprint(relation), python.doprint(relation), where)

    conditions = [
        Condition(
            f"{size_name(names, place)} == {words.doprint(size)}",
            f"{_code(place)} == {python.doprint(size)}",
        )
        for place, size in sizes.items()
        if places.get(size) != place
    ]
    conditions += [condition(bound) for symbol in places for bound in _bounds(symbol, decided)]
    assumed = [condition(sympy.Ne(symbol, 1)) for symbol in places]
    asked = []
    for decision in decided.decisions:
        relation, where = decision.relation, decision.where
        if decision.above_one:
            asked.append(condition(relation, where))
        elif not decision.by_code and (size := _taken_for_several(relation)) is not None:
            assumed += [condition(sympy.Ne(size, 1), where), condition(relation, where)]
        else:
            conditions.append(condition(relation, where))
    result = Constraints(
        names=tuple(names),
        ranks=tuple(len(shape) for shape in shapes),
        static={place: int(size) for place, size in sizes.items() if size.is_number},
        conditions=_distinct(conditions),
        assumed=_distinct(assumed),
        asked=_distinct(asked),
    )
    _check_on_the_example(result, sizes, decided)
    return result


def _taken_for_several(relation: sympy.Basic) -> sympy.Expr | None:
    """The size that a relation only says is not 1, or not 0; None where it says something else.

    ``size != 1`` and ``size >= 2`` are what operators ask about broadcasting and contiguity,
    ``size != 0`` about empty tensors. ``size > 1`` is not among them: so a slice asks whether it
    starts behind the end of a dimension of size 1.
    """
    if isinstance(relation, sympy.Ne):
        left, right = relation.args
        return left if right in (0, 1) else right if left in (0, 1) else None
    return relation.lhs if isinstance(relation, sympy.Ge) and relation.rhs == 2 else None


def _bounds(symbol: sympy.Basic, decided: Decided) -> list[sympy.Basic]:
    """The bounds of a dimension; from below 1, unless more than the decisions say is needed."""
    low, high = decided.bounds.get(symbol, (None, None))
    least = low if low is not None and low > 2 and not _explained(symbol, low, decided) else 1
    bounds = [sympy.Ge(symbol, least, evaluate=False)]
    return bounds if high is None else [*bounds, sympy.Le(symbol, high, evaluate=False)]


def _explained(symbol: sympy.Basic, low: int, decided: Decided) -> bool:
    """Whether each size from 2 to a lower bound is excluded by a decision about it alone.

    Such a bound, "at least 3", merely sums up decisions, such as ``size - 1 != 1``.
    """
    own = [d.relation for d in decided.decisions if d.relation.free_symbols == {symbol}]
    return low <= _LOWEST and all(
        any(_excludes(relation, symbol, size) for relation in own) for size in range(2, low)
    )


def _excludes(relation: sympy.Basic, symbol: sympy.Basic, size: int) -> bool:
    try:
        return bool(relation.xreplace({symbol: sympy.Integer(size)}) == sympy.false)
    except ZeroDivisionError:  # as the module's own code divides by it
        return True


def _check_on_the_example(
    constraints: Constraints, sizes: Mapping[Place, sympy.Expr], decided: Decided
) -> None:
    """Raises where what was understood of the trace does not hold at the sizes that were traced."""
    values = {symbol: sympy.Integer(value) for symbol, value in decided.values.items()}
    traced = [
        [int(sizes[i, axis].xreplace(values)) for axis in range(rank)]
        for i, rank in enumerate(constraints.ranks)
    ]
    try:
        broken = constraints.why_not(traced)
        constraints.untraced(traced)
    except (NameError, TypeError) as error:  # a function that only sympy knows
        broken = f"{type(error).__name__}: {error}"
    if broken:
        raise _undecidable(broken, "")


def _undecidable(relation: str, where: str) -> CaptureError:
    return CaptureError(
        "the sizes of the inputs alone do not tell for which calls the graph would hold",
        where=where,
        because="the code depends on a number that the values of a tensor decide, such as how "
        f"many elements are selected (in the trace: {relation})",
        help="avoid code that depends on how many elements the values of a tensor select, or "
        "leave this module to eager",
    )


class _Python(PythonPrinter):
    """Prints relations as Python, with names of its own for the symbols."""

    def __init__(self, names: Mapping[sympy.Basic, str]) -> None:
        super().__init__()
        self.names = names

    # sympy finds these by the names of its classes.
    def _print_Symbol(self, symbol: sympy.Basic) -> str:  # noqa: N802
        return self.names[symbol]

    def _print_Add(self, expression: sympy.Basic, order: Any = None) -> str:  # noqa: N802
        first, *rest = sorted(expression.args, key=_is_negative)
        text = self.parenthesize(first, PRECEDENCE["Add"])
        for term in rest:
            sign, size = (" - ", -term) if _is_negative(term) else (" + ", term)
            text += sign + self.parenthesize(size, PRECEDENCE["Mul"])
        return text

    def _print_ToFloat(self, expression: sympy.Basic) -> str:  # noqa: N802
        return f"float({self._print(expression.args[0])})"

    def _print_OpaqueUnaryFn_sqrt(self, expression: sympy.Basic) -> str:  # noqa: N802
        return f"math.sqrt({self._print(expression.args[0])})"


def _is_negative(term: sympy.Basic) -> bool:
    return bool(term.could_extract_minus_sign())


def _distinct(conditions: Sequence[Condition]) -> tuple[Condition, ...]:
    first: dict[str, Condition] = {}
    for condition in conditions:
        first.setdefault(condition.code, condition)
    return tuple(first.values())


def _code(place: Place) -> str:
    return f"s[{place[0]}][{place[1]}]"

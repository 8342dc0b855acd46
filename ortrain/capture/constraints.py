"""Which other input shapes a capture is valid for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

Place = tuple[int, int]  # (which tensor, which axis)
Shapes = Sequence[Sequence[int]]
_REMEMBERED = 4096


@dataclass(frozen=True)
class Range:
    """Bounds of one symbolic dimension.

    Attributes:
        symbol: its name in the graph's shapes.
        places: where it occurs.
        low: smallest size; a 2 that stands only for "the trace saw more than 1" is not here.
        high: largest size, None without a bound.
    """

    symbol: str
    places: tuple[Place, ...]
    low: int
    high: int | None


@dataclass
class Constraints:
    """What the trace has fixed about the shapes of the tensors of a call, in flat order.

    Attributes:
        names: of the tensors.
        ranks: of the tensors.
        static: dimensions that became constants, with their size.
        equal: pairs of dimensions that must agree.
        ranges: of the symbolic dimensions.
        derived: dimensions that follow from others, such as ``2*s0``.
        guards: further conditions on the symbols.
        assumed: conditions that only say that some size is not 1 (or 0): the trace takes a size
            above 1 as different from 1. Graphs hold at 1 as a rule; who uses one there should
            compare it with the module once.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    static: dict[Place, int] = field(default_factory=dict)
    equal: tuple[tuple[Place, Place], ...] = ()
    ranges: tuple[Range, ...] = ()
    derived: dict[Place, sympy.Expr] = field(default_factory=dict)
    guards: tuple[sympy.Basic, ...] = ()
    assumed: tuple[sympy.Basic, ...] = ()

    def __post_init__(self) -> None:
        self._static = [(i, axis, size) for (i, axis), size in self.static.items()]
        self._equal = [(*a, *b) for a, b in self.equal]
        self._first = [(r.symbol, *r.places[0], r.low, r.high) for r in self.ranges]
        self._bounds = [f[1:] for f in self._first]
        first = {symbol: (i, axis) for symbol, i, axis, *_ in self._first}
        self._derived = [
            (i, axis, _Expression(expression, first))
            for (i, axis), expression in self.derived.items()
        ]
        self._guards = [_Expression(guard, first) for guard in self.guards]
        # Nearly all assumptions are that a symbol is at least 2, which needs no sympy.
        least = [a for a in self.assumed if isinstance(a, sympy.Ge) and a.args[0].is_Symbol]
        self._least = [(*first[str(a.args[0])], int(a.args[1])) for a in least]
        self._assumed = [_Expression(a, first) for a in self.assumed if a not in least]
        self._answers: dict[tuple[Any, ...], bool] = {}

    def accepts(self, shapes: Shapes) -> bool:
        """Whether a call with these shapes may use the capture (sizes of 1 taken as any other)."""
        if len(shapes) != len(self.ranks):
            return False
        for shape, rank in zip(shapes, self.ranks, strict=True):
            if len(shape) != rank:
                return False
        for i, axis, size in self._static:
            if shapes[i][axis] != size:
                return False
        for i, axis, j, other in self._equal:
            if shapes[i][axis] != shapes[j][other]:
                return False
        for i, axis, low, high in self._bounds:
            size = shapes[i][axis]
            if size < low or (high is not None and size > high):
                return False
        if self.derived or self.guards:
            return self._remembered("accepts", shapes, self._general)
        return True

    def assumes(self, shapes: Shapes) -> bool:
        """Whether shapes that are accepted are sizes that the trace itself covers.

        False at a size of 1 where the trace saw a larger one: see :attr:`assumed`.
        """
        return self._remembered("assumes", shapes, self._covered)

    def _remembered(self, question: str, shapes: Shapes, answer: Any) -> bool:
        key = (question, *map(tuple, shapes))
        known = self._answers.get(key)
        if known is None:
            if len(self._answers) >= _REMEMBERED:
                self._answers.clear()
            known = self._answers[key] = answer(shapes)
        return known

    def _general(self, shapes: Shapes) -> bool:
        return all(
            expression(shapes) == shapes[i][axis] for i, axis, expression in self._derived
        ) and all(guard(shapes) for guard in self._guards)

    def _covered(self, shapes: Shapes) -> bool:
        return all(shapes[i][axis] >= size for i, axis, size in self._least) and all(
            guard(shapes) for guard in self._assumed
        )

    def why_not(self, shapes: Shapes) -> str:
        """The first condition that shapes break, in words; empty if they are accepted."""
        if len(shapes) != len(self.ranks):
            return f"{len(shapes)} tensors instead of {len(self.ranks)}"
        for name, shape, rank in zip(self.names, shapes, self.ranks, strict=True):
            if len(shape) != rank:
                return f"{name} has {len(shape)} dimensions instead of {rank}"
        for (i, axis), size in self.static.items():
            if shapes[i][axis] != size:
                return (
                    f"{self._place(i, axis)} is {shapes[i][axis]}; the graph has it fixed to {size}"
                )
        for (i, axis), (j, other) in self.equal:
            if shapes[i][axis] != shapes[j][other]:
                return f"{self._place(i, axis)} differs from {self._place(j, other)}"
        for known in self.ranges:
            i, axis = known.places[0]
            size = shapes[i][axis]
            if size < known.low or (known.high is not None and size > known.high):
                return f"{self._place(i, axis)} is {size}, outside {known.low} … {known.high}"
        return "" if self.accepts(shapes) else "a condition on several sizes does not hold"

    def _place(self, i: int, axis: int) -> str:
        return f"{self.names[i]}.shape[{axis}]"


class _Expression:
    """A sympy expression that is evaluated where the sizes of its symbols stand.

    Args:
        expression: of sizes.
        places: where each symbol stands, by its name.
    """

    def __init__(self, expression: sympy.Basic, places: Mapping[str, Place]) -> None:
        self.expression = expression
        self.places = [(symbol, *places[str(symbol)]) for symbol in expression.free_symbols]

    def __call__(self, shapes: Shapes) -> Any:
        sizes = {symbol: shapes[i][axis] for symbol, i, axis in self.places}
        return sympy_interp(PythonReferenceAnalysis, sizes, self.expression)


def is_assumption(guard: sympy.Basic) -> bool:
    """Whether a guard merely says that some size is not 0 or 1.

    ``Ne(e, 1)``, ``Ne(e, 0)``, ``e >= 2`` and ``e > 1``: the trace adds them wherever it decides
    about contiguity and broadcasting.
    """
    if isinstance(guard, sympy.Ne):
        return any(side in (0, 1) for side in guard.args)
    if isinstance(guard, sympy.Ge):
        return guard.args[1] in (1, 2)
    if isinstance(guard, sympy.Gt):
        return guard.args[1] in (0, 1)
    if isinstance(guard, sympy.Le):
        return guard.args[0] in (1, 2)
    if isinstance(guard, sympy.Lt):
        return guard.args[0] in (0, 1)
    return False


def constraints_of(
    names: Sequence[str],
    shapes: Sequence[Sequence[Any]],
    bounds: dict[Any, Any],
    guards: Sequence[sympy.Basic],
) -> Constraints:
    """Reads the constraints off an exported program.

    Args:
        names: of the tensors.
        shapes: of the tensors, as ints and ``torch.SymInt``.
        bounds: the program's range constraints.
        guards: the conditions under which the trace went the way it did.
    """
    static: dict[Place, int] = {}
    places: dict[sympy.Symbol, list[Place]] = {}
    derived: dict[Place, sympy.Expr] = {}
    for i, shape in enumerate(shapes):
        for axis, size in enumerate(shape):
            if isinstance(size, int):
                static[i, axis] = size
                continue
            expression = size.node.expr
            if expression.is_Symbol:
                places.setdefault(expression, []).append((i, axis))
            elif expression.is_number:
                static[i, axis] = int(expression)
            else:
                derived[i, axis] = expression
    known_guards = [g for g in guards if not g.free_symbols - set(places)]
    hard = [g for g in known_guards if not is_assumption(g)]
    assumed = [sympy.Ge(symbol, 2, evaluate=False) for symbol in places]
    assumed += dict.fromkeys(g for g in known_guards if is_assumption(g))
    ranges = []
    for symbol, where in places.items():
        bound = bounds.get(symbol)
        low, high = (1, None) if bound is None else (_integer(bound.lower), _integer(bound.upper))
        low = 1 if low is None or _explained(symbol, low, assumed) else low
        ranges.append(Range(str(symbol), tuple(where), low, high))
    return Constraints(
        names=tuple(names),
        ranks=tuple(len(shape) for shape in shapes),
        static=static,
        equal=tuple((where[0], other) for where in places.values() for other in where[1:]),
        ranges=tuple(ranges),
        derived=derived,
        guards=tuple(dict.fromkeys(g for g in hard if not _is_bound(g))),
        assumed=tuple(assumed),
    )


def _explained(symbol: sympy.Symbol, low: int, assumed: Sequence[sympy.Basic]) -> bool:
    """Whether a lower bound merely sums up assumptions, such as ``s - 1`` being at least 2."""
    own = [guard for guard in assumed if guard.free_symbols == {symbol}]
    conditions = [_Expression(guard, {str(symbol): (0, 0)}) for guard in own]
    return all(any(not holds([[size]]) for holds in conditions) for size in range(1, low))


def _is_bound(guard: sympy.Basic) -> bool:
    """Whether the guard compares a symbol with a number: its range says that already."""
    inequality = isinstance(guard, sympy.Le | sympy.Lt | sympy.Ge | sympy.Gt)
    return inequality and all(side.is_Symbol or side.is_number for side in guard.args)


def _integer(bound: Any) -> int | None:
    return int(bound) if getattr(bound, "is_Integer", False) and bound < 2**62 else None

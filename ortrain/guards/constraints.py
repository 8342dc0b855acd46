"""Which other input shapes a capture is valid for: conditions that every new tuple of sizes meets.

:mod:`ortrain.capture.trace.outcomes` makes them of what a trace has decided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Place = tuple[int, int]  # (which tensor, which axis)
Shapes = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Condition:
    """A relation between sizes, as Python.

    Attributes:
        text: in the user's words: ``x.shape[0] % 2 == 0``.
        code: of a list of shapes ``s``: ``s[0][0] % 2 == 0``.
        where: what asked for it, empty where that is not known.
    """

    text: str
    code: str
    where: str = ""


@dataclass
class Constraints:
    """What the trace has fixed about the shapes of the tensors of a call, in flat order.

    Attributes:
        names: of the tensors.
        ranks: of the tensors.
        static: dimensions that became constants, with their size.
        conditions: that shapes must meet.
        assumed: what operators have assumed: that some size is not 1, or not 0.
        asked: what Python code has asked, and what holds of all sizes above 1.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    static: dict[Place, int] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()
    assumed: tuple[Condition, ...] = ()
    asked: tuple[Condition, ...] = ()

    def __post_init__(self) -> None:
        self._conditions = _compiled(self.conditions)
        self._assumed = _compiled(self.assumed)
        self._asked = _compiled(self.asked)

    def accepts(self, shapes: Shapes) -> bool:
        """Whether a call with these shapes may use the capture (sizes of 1 taken as any other)."""
        return tuple(map(len, shapes)) == self.ranks and all(self._conditions(shapes))

    def assumes(self, shapes: Shapes) -> bool:
        """Whether shapes that are accepted are sizes that the trace itself covers.

        False where something is 1 that was larger in the trace.
        """
        return not self.untraced(shapes)

    def untraced(self, shapes: Shapes) -> tuple[Any, ...]:
        """What the trace does not cover at shapes that are accepted; empty where it covers them.

        One comparison with the module counts for all calls that give the same. Where Python code
        asks whether something is 1, these are calls of the same shapes only: what else it would
        ask on the other way is not known.
        """
        if not all(self._asked(shapes)):
            return tuple(map(tuple, shapes))
        held = self._assumed(shapes)
        return () if all(held) else tuple(i for i, holds in enumerate(held) if not holds)

    def why_not(self, shapes: Shapes) -> str:
        """The first condition that shapes break, in words; empty if they are accepted."""
        if len(shapes) != len(self.ranks):
            return f"{len(shapes)} tensors instead of {len(self.ranks)}"
        for name, shape, rank in zip(self.names, shapes, self.ranks, strict=True):
            if len(shape) != rank:
                return f"{name} has {len(shape)} dimensions instead of {rank}"
        for (i, axis), size in self.static.items():
            if shapes[i][axis] != size:
                name = size_name(self.names, (i, axis))
                return f"{name} is {shapes[i][axis]}; the graph has it fixed to {size}"
        for condition, holds in zip(self.conditions, self._conditions(shapes), strict=True):
            if not holds:
                asked = f" (asked at {condition.where})" if condition.where else ""
                return f"{condition.text} does not hold{asked}"
        return ""


def size_name(names: Sequence[str], place: Place) -> str:
    """A size in the user's words: ``x.shape[0]``."""
    return f"{names[place[0]]}.shape[{place[1]}]"


def _compiled(conditions: Sequence[Condition]) -> Callable[[Shapes], tuple[bool, ...]]:
    """One function for all conditions: a new tuple of sizes costs a few microseconds."""
    together = _function("".join(f"bool({condition.code}), " for condition in conditions))

    def hold(shapes: Shapes) -> tuple[bool, ...]:
        try:
            return together(shapes)
        except (ArithmeticError, ValueError):  # such as a division by a size that is 0 here
            return tuple(_holds(condition, shapes) for condition in conditions)

    return hold


def _holds(condition: Condition, shapes: Shapes) -> bool:
    try:
        return all(_function(f"bool({condition.code}), ")(shapes))
    except (ArithmeticError, ValueError):
        return False


def _function(code: str) -> Callable[[Shapes], tuple[bool, ...]]:
    return eval(f"lambda s: ({code})", {"math": math})  # noqa: S307

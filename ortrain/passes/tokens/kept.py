"""Sets of tokens, known by what decides about them when the program runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.passes.tokens.frames import Grid

# What an additive mask shuts out for certain: scores that a float32 can tell from it do not occur.
SHUT = -1e30

# What the axes of a condition are; another axis has its own number.
ROW, QUERY, KEY = -3, -2, -1


@dataclass(frozen=True)
class Condition:
    """What lets some queries see some keys.

    Attributes:
        value: true, or other than 0, where they do; floating: what is added to scores.
        places: for each axis of the value ``ROW``, ``QUERY``, ``KEY``, the number of another axis
            of the scores, or None where its size is 1.
        negated: whether it is false where they do.
        finite: whether a number that is not minus infinity stands where they do not.
    """

    value: ir.Value
    places: tuple[int | None, ...]
    negated: bool = False
    finite: bool = False

    @property
    def adds(self) -> bool:
        """Whether it is added to scores."""
        return self.value.dtype in shapes.FLOATING

    @property
    def names(self) -> tuple[str, ...]:
        """By which conditions are put in order."""
        return (self.value.name or "", str(self.places), str(self.negated), str(self.finite))


@dataclass(frozen=True)
class Position:
    """One position of each row; from the end where it is negative."""

    number: int
    kind: ClassVar[str] = "position"

    @property
    def names(self) -> tuple[str, ...]:
        """By which sets are put in order."""
        return ("position", str(self.number))

    @property
    def values(self) -> tuple[ir.Value, ...]:
        """What decides about it."""
        return ()


@dataclass(frozen=True)
class Labels:
    """Tokens with a label other than one that is ignored."""

    value: ir.Value
    ignored: int
    kind: ClassVar[str] = "labels"

    @property
    def names(self) -> tuple[str, ...]:
        """By which sets are put in order."""
        return ("labels", self.value.name or "", str(self.ignored))

    @property
    def values(self) -> tuple[ir.Value, ...]:
        """What decides about it."""
        return (self.value,)


@dataclass(frozen=True)
class Keys:
    """Keys that some query sees: where all of some conditions hold.

    A query that they shut out from every key by a number that is finite sees all of them. Such
    queries count where somebody reads what they find: the others may see what they like.

    Attributes:
        conditions: at least one.
        queries: the tokens at which queries are read; None for all of them.
        grid: of the queries, where conditions tell them apart. Where it is that of the keys, a key
            is a query, too.
    """

    conditions: tuple[Condition, ...]
    queries: frozenset[Kept] | None = None
    grid: Grid | None = None
    kind: ClassVar[str] = "keys"

    @property
    def loses(self) -> bool:
        """Whether a query that is shut out from every key sees keys all the same."""
        return any(each.finite or each.adds for each in self.conditions)

    @property
    def names(self) -> tuple[str, ...]:
        """By which sets are put in order."""
        found = [name for each in self.conditions for name in each.names]
        if self.queries is not None:
            found += ["of", *(n for names in sorted(k.names for k in self.queries) for n in names)]
        return ("keys", *found)

    @property
    def values(self) -> tuple[ir.Value, ...]:
        """What decides about it."""
        inner = [value for each in self.queries or () for value in each.values]
        return (*(each.value for each in self.conditions), *inner)

    @property
    def depth(self) -> int:
        """How many sets of keys it is made of, one after another."""
        return 1 + max((k.depth for k in self.queries or () if isinstance(k, Keys)), default=0)


Kept = Position | Labels | Keys

Set = frozenset[Kept]

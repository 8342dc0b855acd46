"""Sizes of axes as sums of products of symbols.

::

    4 * seq * (batch + 1)   is   4*batch*seq + 4*seq

Two sizes that are equal whatever their symbols are have the same terms, so that they compare equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

# The symbols of a product, sorted; one that is there twice is squared.
_Product = tuple[str, ...]
# Of a division; sizes of models have one or two terms.
_MOST_TERMS = 32


@dataclass(frozen=True)
class Size:
    """A sum of products of symbols, each of which is a whole number of at least 0.

    Attributes:
        terms: (symbols of a product, its factor), sorted, without factors of 0.
    """

    terms: tuple[tuple[_Product, int], ...]

    @classmethod
    def of(cls, number: int) -> Size:
        """A number."""
        return cls((((), number),) if number else ())

    @classmethod
    def symbol(cls, name: str) -> Size:
        """A size that is known by its name alone."""
        return cls((((name,), 1),))

    @property
    def number(self) -> int | None:
        """The size, where it is a number."""
        if not self.terms:
            return 0
        ((product, factor), *others) = self.terms
        return factor if not product and not others else None

    @property
    def name(self) -> str | None:
        """The name, where it is one symbol alone."""
        if len(self.terms) == 1 and self.terms[0][1] == 1 and len(self.terms[0][0]) == 1:
            return self.terms[0][0][0]
        return None

    @property
    def symbols(self) -> frozenset[str]:
        """All symbols in it."""
        return frozenset(name for product, _ in self.terms for name in product)

    @property
    def certain(self) -> bool:
        """Whether it is at least 0 whatever its symbols are."""
        return all(factor > 0 for _, factor in self.terms)

    def __add__(self, other: Size) -> Size:
        return _sum([*self.terms, *other.terms])

    def __sub__(self, other: Size) -> Size:
        return _sum([*self.terms, *((product, -factor) for product, factor in other.terms)])

    def __mul__(self, other: Size) -> Size:
        return _sum((tuple(sorted((*a, *b))), x * y) for a, x in self.terms for b, y in other.terms)

    def divided(self, other: Size) -> Size | None:
        """The size that, times the other one, is this; None where there is none."""
        if not other.terms:
            return None
        rest, quotient = self, Size(())
        product, factor = _leading(other)
        for _ in range(_MOST_TERMS):
            if not rest.terms:
                return quotient
            mine, count = _leading(rest)
            left = _without(mine, product)
            if left is None or count % factor:
                return None
            part = Size(((left, count // factor),))
            quotient, rest = quotient + part, rest - part * other
        return None

    def differs(self, other: Size) -> bool:
        """Whether the two are never equal, whatever their symbols are."""
        for difference in (self - other, other - self):
            if difference.certain and any(not product for product, _ in difference.terms):
                return True
        return False

    def replaced(self, name: str, by: Size) -> Size:
        """The size with another one in the place of a symbol."""
        result = Size(())
        for product, factor in self.terms:
            part = Size((((), factor),))
            for symbol in product:
                part = part * (by if symbol == name else Size.symbol(symbol))
            result = result + part
        return result

    def __str__(self) -> str:
        parts = []
        for product, factor in self.terms:
            symbols = [f"({name})" if not name.isidentifier() else name for name in product]
            parts.append(
                "*".join([str(factor), *symbols] if factor != 1 or not product else symbols)
            )
        return " + ".join(parts) or "0"


def total(sizes: Iterable[Size]) -> Size:
    """The product of some sizes: how many elements a value has."""
    return math.prod(sizes, start=Size.of(1))


def _sum(terms: Iterable[tuple[_Product, int]]) -> Size:
    found: dict[_Product, int] = {}
    for product, factor in terms:
        found[product] = found.get(product, 0) + factor
    return Size(tuple(sorted((product, factor) for product, factor in found.items() if factor)))


def _leading(size: Size) -> tuple[_Product, int]:
    """The term of the highest degree; of several, the last in the order of names."""
    return max(size.terms, key=lambda term: (len(term[0]), term[0]))


def _without(product: _Product, part: _Product) -> _Product | None:
    left = list(product)
    for name in part:
        if name not in left:
            return None
        left.remove(name)
    return tuple(left)

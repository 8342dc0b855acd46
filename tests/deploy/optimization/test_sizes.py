"""Sizes as sums of products: equal ones are equal, whatever they were made of."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ortrain.deploy.optimization.fusions.sizes import Size, total

B, N, FOUR = Size.symbol("b"), Size.symbol("n"), Size.of(4)


def value(size: Size, **symbols: int) -> int:
    """A size in numbers, from its terms alone."""
    return sum(
        factor * int(np.prod([symbols[name] for name in product], dtype=object))
        for product, factor in size.terms
    )


def test_equal_sizes_are_equal_in_any_order() -> None:
    assert B * N * FOUR == N * FOUR * B
    assert (B + N) * FOUR == FOUR * N + B * FOUR
    assert (B + N) * (B - N) == B * B - N * N
    assert Size.of(0) == B - B
    assert B + Size.of(1) != B
    assert len({B * N, N * B, B}) == 2


def test_numbers_and_names_are_told() -> None:
    assert [(FOUR * FOUR).number, Size.of(0).number, (B - B).number, B.number] == [16, 0, 0, None]
    assert [B.name, (B * N).name, (FOUR * B).name, FOUR.name] == ["b", None, None, None]
    assert str(FOUR * N * B + Size.of(2)) == "2 + 4*b*n"
    assert str(Size.symbol("a + b") * FOUR) == "4*(a + b)"
    assert (B * N + N).symbols == {"b", "n"}


@pytest.mark.parametrize(
    ("whole", "part", "expected"),
    [
        (B * N * Size.of(64), B * N * Size.of(16), FOUR),
        (B * N * Size.of(64), FOUR * N, Size.of(16) * B),
        ((B + N) * Size.of(6), B + N, Size.of(6)),
        ((B + N) * (N + FOUR) * B, B + N, (N + FOUR) * B),
        (B * B - N * N, B - N, B + N),
        (B * N, FOUR, None),
        (B + N, B, None),
        (B * Size.of(6), FOUR, None),
        (B, Size.of(0), None),
        (Size.of(0), B, Size.of(0)),
    ],
)
def test_a_division_is_exact_or_none(whole: Size, part: Size, expected: Size | None) -> None:
    assert whole.divided(part) == expected


def test_drawn_products_are_divided_again() -> None:
    random = np.random.default_rng(0)
    parts = [B, N, FOUR, B + N, B * N + Size.of(1), N - B, Size.of(3) * N]
    for a, b in itertools.product(parts, parts):
        assert (a * b).divided(b) == a
        symbols = {"b": int(random.integers(9)), "n": int(random.integers(9))}
        assert value(a * b, **symbols) == value(a, **symbols) * value(b, **symbols)
        assert value(a + b, **symbols) == value(a, **symbols) + value(b, **symbols)


def test_what_is_never_equal_is_known() -> None:
    assert B.differs(Size.of(-1))
    assert (B + Size.of(1)).differs(B)
    assert Size.of(3).differs(FOUR)
    assert not B.differs(N)
    assert not B.differs(Size.of(1))
    assert not (B + N).differs(Size.of(1))


def test_a_symbol_is_replaced_everywhere() -> None:
    size = B * B * FOUR + N
    assert size.replaced("b", N + Size.of(1)) == (N + Size.of(1)) * (N + Size.of(1)) * FOUR + N
    assert total([B, N, FOUR]) == FOUR * B * N
    assert total([]) == Size.of(1)

"""Sizes of symbolic dimensions."""

from __future__ import annotations

import pytest

from ortrain.graph.shapes import Dim, evaluate


@pytest.mark.parametrize(
    ("dim", "size"),
    [
        (3, 3),
        (None, None),
        ("s76", 400),
        ("((s76//40)) - 1", 9),
        ("max(1, s76) * other", 800),
        ("unknown", None),
        ("unknown // 2", None),
        ("a name: of the user's", 5),
        ("another name", None),
    ],
)
def test_a_dimension_is_as_large_as_its_symbols_say(dim: Dim, size: int | None) -> None:
    assert evaluate(dim, {"s76": 400, "other": 2, "a name: of the user's": 5}) == size

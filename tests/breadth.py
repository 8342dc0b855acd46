"""Tables of which `make test` runs a sample, and `make test-breadth` all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sampled(names: Iterable[str], sample: Collection[str]) -> list[Any]:
    """The names as parameters, those beyond the sample marked ``breadth``.

    Raises:
        ValueError: the sample names what is not there.
    """
    names = list(names)
    if unknown := set(sample) - set(names):
        raise ValueError(f"no such case: {', '.join(sorted(unknown))}")
    return [n if n in sample else pytest.param(n, marks=pytest.mark.breadth) for n in names]

"""The page of documentation that the results become."""

from __future__ import annotations


def page() -> str:
    """Totals, and a table of families."""
    raise NotImplementedError

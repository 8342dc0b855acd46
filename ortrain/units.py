"""Numbers for people."""

from __future__ import annotations


def megabytes(count: float) -> str:
    """A number of bytes."""
    return f"{count / 2**20:,.1f} MiB"

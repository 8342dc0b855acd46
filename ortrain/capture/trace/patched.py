"""Attributes of PyTorch's classes and modules that are others while a module is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Puts a value in the place of an attribute; one that was inherited or missing is so again."""
    had, own = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, own)
        else:
            delattr(owner, name)

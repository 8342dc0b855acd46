"""Training and evaluation mode of a module's parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Gives each part the mode back that it has now."""
    modes = {part: part.training for part in module.modules()}
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode

"""Modes of a module's parts and of what is around them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.utils import parametrize


@contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Gives each part the mode back that it has now."""
    modes = {part: part.training for part in module.modules()}
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


@contextmanager
def parametrizations_uncached() -> Iterator[None]:
    """Computes parametrized tensors afresh, and keeps none of them for the calls afterwards.

    ``torch.nn.utils.parametrize.cached()`` may be around: it would keep those of a trace.
    """
    own = parametrize._cache, parametrize._cache_enabled
    parametrize._cache, parametrize._cache_enabled = {}, 0
    try:
        yield
    finally:
        parametrize._cache, parametrize._cache_enabled = own

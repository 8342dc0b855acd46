"""How often a tensor was written to in place, as autograd counts it for what it has saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

import torch
from torch import Tensor


def version_of(tensor: Tensor) -> int:
    """A number that grows with each write in place; 0 of a tensor that counts none."""
    return 0 if tensor.is_inference() else tensor._version


def put_back(tensor: Tensor, held: Tensor, version: int) -> None:
    """Has a tensor hold what it held, as if nothing had ever been written to it.

    Autograd may have saved it for a backward that is still to come, which would raise.

    Args:
        tensor: whose contents may be others by now.
        held: what it held.
        version: that it had then.
    """
    tensor.data.copy_(held)
    at_version(tensor, version)


def at_version(tensor: Tensor, version: int) -> None:
    """Has a tensor that holds what it held count no write since."""
    if version_of(tensor) != version:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


count: Callable[[Tensor], int] = attrgetter("_version")
"""The same of a tensor that counts, the fastest way; RuntimeError for one of inference mode."""


def contents(tensors: Sequence[Tensor]) -> list[int]:
    """The versions of tensors."""
    return [version_of(tensor) for tensor in tensors]

"""What a step computes anew before it updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What the closure of a step returns, with gradients on; None where there is none.

    Args:
        closure: computes the loss anew.
    """
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


__all__ = ["loss_of"]

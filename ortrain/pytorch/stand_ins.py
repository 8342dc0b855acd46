"""Tensors that stand for others: wrappers of a class of their own, without memory.

Private: ``Tensor._make_wrapper_subclass`` and ``torch._C.DisableTorchFunctionSubclass``, which
PyTorch's notes on extending it name. Without them all outputs are computed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


def stand_in(kind: type[Any], like: Tensor) -> Any:
    """A tensor of a class, with the shape, dtype and device of another, and no memory."""
    return Tensor._make_wrapper_subclass(kind, like.shape, dtype=like.dtype, device=like.device)


def as_they_are() -> AbstractContextManager[None]:
    """Functions inside take tensors of such a class as they are, and do not ask it."""
    return torch._C.DisableTorchFunctionSubclass()

"""Who has a tensor: whether its memory may be written anew.

A version counter does not say so. ``tensor.data``, NumPy's views and DLPack's write without it, and
once they are let go of nothing tells that they were there.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from ortrain.pytorch.kernels import uses_in_cpp


def is_alone(tensor: Tensor, *, calls: int = 1) -> bool:
    """Whether one variable has this tensor and its memory, and nothing else has.

    Compared with a new tensor that came as far, in 6 us: whatever else counts in this process now,
    it counts there. Where the frames of Python are another's, as Dynamo's, each call counts twice.

    Args:
        tensor: no temporary.
        calls: from the function that has the variable to this one: one from there itself.
    """
    return _counts(tensor) == _counts_of_new(calls)


def _counts_of_new(calls: int) -> tuple[int, ...]:
    own = torch.empty(1)
    return _handed_on(own, calls)


def _handed_on(tensor: Tensor, calls: int) -> tuple[int, ...]:
    return _counts(tensor) if calls == 1 else _handed_on(tensor, calls - 1)


def _counts(tensor: Tensor) -> tuple[int, ...]:
    """How many have the tensor in Python and in C++, its memory, and what tells of that."""
    storage = tensor.untyped_storage()
    return (
        sys.getrefcount(tensor),
        *uses_in_cpp(tensor),
        sys.getrefcount(storage),
    )

"""Tensors as numpy arrays: what the reference executor takes and gives."""

from __future__ import annotations

from ortrain.extras import require

require("torch", __name__)

from collections.abc import Collection, Sequence

import numpy as np
import torch


class Arrays:
    """The exchange of tensors with programs on numpy."""

    @staticmethod
    def take(tensor: torch.Tensor) -> np.ndarray:
        """An array over the tensor's memory."""
        array: np.ndarray = tensor.detach().resolve_neg().numpy()
        return array

    @staticmethod
    def shares(tensor: torch.Tensor) -> bool:
        """Whether an array can lie over the tensor's memory."""
        return not tensor.is_neg()

    @staticmethod
    def give(value: np.ndarray) -> torch.Tensor:
        """A contiguous tensor, over the array's memory where it is that already."""
        return torch.from_numpy(np.asarray(value, order="C"))

    @classmethod
    def at(cls, values: Sequence[np.ndarray], index: int, is_bool: bool) -> torch.Tensor:
        """One of them."""
        return cls.give(values[index])

    @classmethod
    def all(cls, values: Sequence[np.ndarray], bools: Collection[int] = ()) -> list[torch.Tensor]:
        """All of them."""
        return [cls.give(value) for value in values]

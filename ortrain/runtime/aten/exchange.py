"""Tensors as the values of functions of PyTorch: they are what they are."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch


class Tensors:
    """The exchange of tensors with functions of tensors."""

    @staticmethod
    def take(tensor: torch.Tensor) -> torch.Tensor:
        """The tensor without its history; a copy of a view that stands for its negative."""
        if tensor.requires_grad:
            tensor = tensor.detach()
        return tensor.resolve_neg() if tensor.is_neg() else tensor

    @staticmethod
    def shares(tensor: torch.Tensor) -> bool:
        """Whether the value shares its memory."""
        return not tensor.is_neg()

    @staticmethod
    def give(value: torch.Tensor) -> torch.Tensor:
        """The value."""
        return value

    @staticmethod
    def at(values: Sequence[torch.Tensor], index: int, is_bool: bool) -> torch.Tensor:
        """One of them."""
        return values[index]

    @staticmethod
    def all(values: Sequence[torch.Tensor], bools: Collection[int] = ()) -> list[torch.Tensor]:
        """All of them."""
        return list(values)

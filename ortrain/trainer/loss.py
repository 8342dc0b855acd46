"""A model and the loss that Trainer computes of its outputs, as one module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class ModuleWithLoss(nn.Module):
    """Calls a model and its loss, so that one graph computes both.

    Args:
        model: the model; its parameters are shared.
        compute_loss: ``compute_loss(model, inputs, return_outputs=True, num_items_in_batch=n)``
            returns the loss and the outputs.
    """

    def __init__(self, model: nn.Module, compute_loss: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.__dict__["compute_loss"] = compute_loss

    def forward(
        self, num_items_in_batch: torch.Tensor | None = None, **inputs: Any
    ) -> tuple[torch.Tensor, Any]:
        """The loss and the model's outputs."""
        result: tuple[torch.Tensor, Any] = self.__dict__["compute_loss"](
            self.model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        return result

"""A model and the loss that Trainer computes of its outputs, as one module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import convert_to_fp32
from torch import nn

from ortrain.pytorch.autocast import Autocast, active, autocast_as, without_autocast


class ModuleWithLoss(nn.Module):
    """Calls a model and its loss, so that one graph computes both.

    Args:
        model: the model; its parameters are shared.
        compute_loss: ``compute_loss(model, inputs, return_outputs=True, num_items_in_batch=n)``
            returns the loss and the outputs.
        mixed: whether accelerate puts autocast around the forward. Trainer's loss comes behind it,
            of outputs in float32; log-probabilities in bfloat16 cost a loss of 3.5 a thousandth.
    """

    def __init__(
        self, model: nn.Module, compute_loss: Callable[..., Any], mixed: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.mixed = mixed
        self.__dict__["compute_loss"] = compute_loss

    def forward(
        self, num_items_in_batch: torch.Tensor | None = None, **inputs: Any
    ) -> tuple[torch.Tensor, Any]:
        """The loss and the model's outputs."""
        if not self.mixed:
            return self._with_loss(self.model, inputs, num_items_in_batch)
        model = Prepared(self.model, active())
        with without_autocast():
            return self._with_loss(model, inputs, num_items_in_batch)

    def _with_loss(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | None
    ) -> tuple[torch.Tensor, Any]:
        result: tuple[torch.Tensor, Any] = self.__dict__["compute_loss"](
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        return result


class Prepared(nn.Module):
    """A model as accelerate prepares it: under autocast, with outputs in float32.

    Args:
        model: the model, whose attributes it has.
        autocast: around its forward.
    """

    def __init__(self, model: nn.Module, autocast: Autocast) -> None:
        super().__init__()
        self.__dict__["model"] = model
        self.__dict__["autocast"] = autocast

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        with autocast_as(self.__dict__["autocast"]):
            outputs = self.__dict__["model"](*args, **kwargs)
        return convert_to_fp32(outputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)

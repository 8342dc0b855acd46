"""How forwards had a tensor recorded before there was ``inspect_activation``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortrain.hooks import inspect_activation

if TYPE_CHECKING:
    import torch


class _InspectActivation:
    """The old function of autograd, of which scripts call ``apply``."""

    @staticmethod
    def apply(
        activation_name: str, module_index: object, run_context: object, tensor: torch.Tensor
    ) -> torch.Tensor:
        """The tensor itself; subscribed statistics are written by this name.

        Args:
            activation_name: name of its files.
            module_index: None; read by nobody.
            run_context: of the manager, which has one for the process.
            tensor: a value in a model's forward.
        """
        return inspect_activation(activation_name, tensor)

"""What a module holds, by name, with what it holds under several names and what is None.

Private: the tables ``_modules`` and ``_parameters`` of ``torch.nn.Module``, whose
``named_children()`` leaves such names out. Without them no module is held.
"""

from __future__ import annotations

from torch import nn


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The table of a module's children, which changes as they do."""
    return module._modules


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The table of a module's own parameters, which changes as they do."""
    return module._parameters

"""Tensors that stand in the places of a module's own bear what Python code has put on these.

mup's weights know of which width they are, and others which learning rate or which shard they are
of: plain attributes of a tensor, that no copy of it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from torch import Tensor, nn


def bear_attributes(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Gives stand-ins the attributes of what they stand for, where they have none of that name.

    Args:
        pairs: each a stand-in and the tensor itself.
    """
    for stand_in, tensor in pairs:
        if stand_in is not tensor and tensor.__dict__:
            for name, value in tensor.__dict__.items():
                stand_in.__dict__.setdefault(name, value)


def standing_in(module: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names of a module's parameters and buffers, with the attributes of these."""
    parameters = module.named_parameters(remove_duplicate=False)
    named = chain(parameters, module.named_buffers(remove_duplicate=False))
    bear_attributes((state[name], tensor) for name, tensor in named if name in state)
    return state

"""Whether what runs is in a checkpoint, whose repetition has to save what its first run has saved.

Public, but for how hooks on saved tensors are read, which is :mod:`ortrain.module_state.saving`'s.
"""

from __future__ import annotations

from torch.utils import checkpoint

from ortrain.module_state.saving import saving_hooks


def is_checkpointed() -> bool:
    """Whether a checkpoint without reentrance is around, at its first run or its repetition."""
    hooks = saving_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__name__

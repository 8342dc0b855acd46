"""Which hooks on saved tensors are around: those of a checkpoint, those of the user.

Public, but for how hooks on saved tensors are read, which is :mod:`ortrain.pytorch.saving`'s.
"""

from __future__ import annotations

from torch.autograd import graph
from torch.utils import checkpoint

from ortrain.pytorch.saving import saving_hooks


def is_checkpointed() -> bool:
    """Whether a checkpoint without reentrance is around, at its first run or its repetition."""
    hooks = saving_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__name__


def is_changing() -> bool:
    """Whether hooks are set on saved tensors that may give back others than they were given.

    Those of PyTorch itself, such as ``save_on_cpu``, give back what they were given.
    """
    hooks = saving_hooks(False)
    if hooks is None:
        return False
    return getattr(hooks[0], "__module__", "") not in (checkpoint.__name__, graph.__name__)

"""Modes around eager calls; nothing here loads Dynamo.

Private: ``torch.utils._python_dispatch.TorchDispatchMode``, and its ``_should_skip_dynamo``: a mode
is kept from Dynamo by its decorator, which takes half a second to load it. Without that name it is
loaded at the first call. ``torch._subclasses.FakeTensor``: a tensor that has sizes and no numbers.
"""

import torch
from torch._subclasses import FakeTensor as FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


class EagerMode(TorchDispatchMode):
    """A mode for eager calls, that nothing compiles."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def makes_numbers() -> bool:
    """Whether the tensors that PyTorch makes here have numbers: not under ``FakeTensorMode``."""
    return type(torch.empty(0)) is torch.Tensor

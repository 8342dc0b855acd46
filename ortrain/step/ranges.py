"""Named ranges in a profile: the forwards, backwards and captures of ORTModule.

They are there while a profiler of PyTorch runs, on any device, and under
``torch.autograd.profiler.emit_nvtx()`` as ranges of NVTX. Otherwise nobody asks for them: the
question takes 30 ns of a call, a range that nobody sees takes 10 µs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ortrain.pytorch.backwards import profiled


def marked(name: str) -> AbstractContextManager[Any]:
    """A range of that name around what is inside, while a profiler runs."""
    return torch.profiler.record_function(f"ORTModule.{name}") if profiled() else nullcontext()

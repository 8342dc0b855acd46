"""Nodes of autograd's graph: which ones a backward comes to, and what they take.

Used of torch, beyond what it documents: ``torch._C._will_engine_execute_node``, by which
``torch.autograd.graph.register_multi_grad_hook`` counts, and ``Node._input_metadata``, without
which each gradient is taken to fit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Whether the backward that runs comes to a node, which is none that `autograd.grad` asks for.
executes: Any = torch._C._will_engine_execute_node


def is_asked(node: Any) -> bool:
    """Whether the backward that runs comes to this node."""
    try:
        return bool(executes(node))
    except RuntimeError:  # PyTorch's answer for a leaf that `autograd.grad` asks for
        return True


def takes(node: Any, place: int, gradient: Tensor) -> bool:
    """Whether a gradient has the shape that a node expects at a place; None takes any."""
    expected = getattr(node, "_input_metadata", None)
    return expected is None or tuple(expected[place].shape) == gradient.shape

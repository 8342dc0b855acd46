"""What is around a forward or a backward: hooks on saved tensors, the backward itself, a profiler.

Private: ``torch._C._current_graph_task_id``, ``_get_current_graph_task_keep_graph`` and
``_profiler_enabled`` of ``torch._C._autograd``, ``torch._C._is_tracing``. Without them the import
fails: no graph would know whether another backward is to come.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import graph
from torch.utils import checkpoint

from ortrain.pytorch.saving import saving_hooks

task_of_backward: Any = torch._C._current_graph_task_id
"""A number for the backward that runs in this thread."""

keeps_graph: Any = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the backward that runs leaves the graph for another one, ``retain_graph=True``."""

profiled: Any = torch._C._autograd._profiler_enabled
"""Whether a profiler of PyTorch runs: 30 ns."""

is_traced: Any = torch._C._is_tracing
"""Whether ``torch.jit`` traces what runs."""


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

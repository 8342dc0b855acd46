"""Whether what runs is a repetition: within a backward, or under hooks on what is saved for one.

Private: ``torch._C._current_graph_task_id``; the hooks are those of
:mod:`ortrain.module_state.saving`. Without the name a checkpoint around a model could find another
way in its repetition than before, which PyTorch notices.
"""

from __future__ import annotations

import torch

from ortrain.module_state.saving import saving_hooks

_task = torch._C._current_graph_task_id


def may_repeat() -> bool:
    """Whether a call runs once more in a backward, or is such a repetition."""
    return saving_hooks(False) is not None or _task() != -1

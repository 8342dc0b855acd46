"""What scripts of 2020 set for all sessions of a process, and ask of its processes."""

from __future__ import annotations

from ortrain.extras import require

require("torch", __name__)

import warnings

from ortrain.classic.ranks import place
from ortrain.errors import OrtrainWarning


def set_arena_extend_strategy(strategy: object) -> None:
    """Says nothing of ``kSameAsRequested``, which is so in any case, and that others do nothing."""
    if getattr(strategy, "name", None) != "kSameAsRequested":
        _without_effect(
            "set_arena_extend_strategy", "an arena grows by what is asked of it; Options(arena=)"
        )


def set_cuda_mem_limit(limit: object) -> None:
    """Says that it does nothing: on a GPU memory is PyTorch's."""
    _without_effect(
        "set_cuda_mem_limit",
        "on a GPU memory is PyTorch's; torch.cuda.set_per_process_memory_fraction, or "
        "Options(memory_budget=) for what a step holds",
    )


def set_cuda_device_id(device_id: object) -> None:
    """Says that it does nothing: a module runs where its parameters are."""
    _without_effect("set_cuda_device_id", "a module runs where its parameters are; model.to(…)")


def get_mpi_context_local_rank() -> int:
    """Which process of this machine this one is, as its launcher says; 0 without one."""
    return place().local_rank


def get_mpi_context_local_size() -> int:
    """How many processes this machine has, as its launcher says; 1 without one."""
    return place().local_world


def get_mpi_context_world_rank() -> int:
    """Which of all processes this one is, as its launcher says; 0 without one."""
    return place().rank


def get_mpi_context_world_size() -> int:
    """How many processes there are, as their launcher says; 1 without one."""
    return place().world


def _without_effect(name: str, why: str) -> None:
    warnings.warn(f"{name} does nothing here: {why}", OrtrainWarning, stacklevel=3)

"""What a step holds, a line that ``ORTMODULE_PRINT_MEMORY_STATS`` asks for."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence

import torch

from ortrain.autodiff.held import peak, saved_bytes
from ortrain.runtime.memory import resident
from ortrain.step.build import Plan
from ortrain.step.progress import speaks
from ortrain.units import megabytes

# Each of the first steps has a line, and then those that are powers of two.
_FIRST = 10


def print_memory(
    step: int, plans: Sequence[tuple[Plan, Mapping[str, int]]], device: torch.device
) -> None:
    """Prints what a training step holds beyond weights and inputs, and what memory is taken.

    To standard error, of the first process of several, between the forward and the backward.

    Args:
        step: its number, from 1; not all have a line.
        plans: of its graphs, each with the value of each symbolic dimension.
        device: of its tensors.
    """
    if (step >= _FIRST and step & (step - 1)) or not speaks():
        return
    kept = sum(saved_bytes(plan.programs, sizes) for plan, sizes in plans)
    most = sum(peak(plan.programs, sizes) for plan, sizes in plans)
    parts = [f"{megabytes(kept)} kept for the backward", f"{megabytes(most)} at most"]
    with contextlib.suppress(OSError):  # another system than Linux
        parts.append(f"the process takes {megabytes(resident())}")
    if device.type == "cuda":
        now, most = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        parts.append(f"{megabytes(now)} are allocated on the GPU, {megabytes(most)} at most")
    print(f"ORTModule step {step}: {', '.join(parts)}", file=sys.stderr)

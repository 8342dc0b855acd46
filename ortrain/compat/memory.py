"""``log_memory_usage``: what a process and its GPU hold at a point of a script."""

from __future__ import annotations

from ortrain.extras import require

require("torch", __name__)

import contextlib
import logging

import torch

from ortrain.runtime.memory import resident

_MIB = 1 << 20


def log_memory_usage(
    cur_phase: str,
    rank_0_only: bool = True,
    step_info: str = "",
    logger: logging.Logger | None = None,
    module: torch.nn.Module | None = None,
) -> None:
    """Logs memory in MiB: of the process, of the GPU where there is one, and of a module.

    Args:
        cur_phase: name of the point.
        rank_0_only: of several processes only the first one says something.
        step_info: what stands in front.
        logger: gets the line, at level INFO; by default it is printed.
        module: whose parameters, gradients and buffers are counted.
    """
    group = torch.distributed
    if rank_0_only and group.is_available() and group.is_initialized() and group.get_rank() != 0:
        return
    parts = {}
    with contextlib.suppress(OSError):  # another system than Linux
        parts["process"] = resident()
    if torch.cuda.is_available():
        parts |= {
            "allocated": torch.cuda.memory_allocated(),
            "max allocated": torch.cuda.max_memory_allocated(),
            "cached": torch.cuda.memory_reserved(),
            "max cached": torch.cuda.max_memory_reserved(),
        }
    if module is not None:
        parameters = list(module.parameters())
        parts |= {
            "parameters": sum(p.nbytes for p in parameters),
            "gradients": sum(p.grad.nbytes for p in parameters if p.grad is not None),
            "buffers": sum(b.nbytes for b in module.buffers()),
        }
    told = ", ".join(f"{name} {size / _MIB:.0f} MiB" for name, size in parts.items())
    line = f"{step_info}{' ' if step_info else ''}{cur_phase}: {told}"
    if logger is None:
        print(line)
    else:
        logger.info(line)

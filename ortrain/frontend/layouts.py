"""How results lie in memory of which the fakes of a trace say it wrong.

The order of axes in memory of an output is part of what PyTorch gives: ``view`` may fail without
it. A trace takes it from fakes, whose rules are written beside the kernels. On a CPU those of some
kernels are others. (Found by comparing both for some hundred functions in all orders of axes.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def _row_by_row(_: Tensor) -> torch.memory_format:
    return torch.contiguous_format


def _as_given(given: Tensor) -> torch.memory_format:
    """Channels last where those of what is given are, whole and beyond doubt."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(given.dim())
    if last is None or given.is_contiguous() or not given.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


_KERNELS: dict[Callable[..., Any], Callable[[Tensor], torch.memory_format]] = {
    functional.batch_norm: _as_given,
    torch.batch_norm: _as_given,
    functional.logsigmoid: _row_by_row,
    functional.rrelu: _row_by_row,
    torch.rrelu: _row_by_row,
    functional.unfold: _row_by_row,
}


def laid_out(target: Any, args: Sequence[Any], result: Any) -> Any:
    """A result of a function as the function's kernel leaves it in memory.

    Args:
        target: the function.
        args: of the call.
        result: what its fake gives.
    """
    given = args[0] if args else None
    if not isinstance(given, Tensor) or given.device.type != "cpu":
        return result
    kernel = _KERNELS.get(target)
    if target is functional.interpolate and given.dim() == 3:
        kernel = _row_by_row
    return result if kernel is None else result.contiguous(memory_format=kernel(given))

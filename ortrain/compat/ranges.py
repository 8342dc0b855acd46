"""Named ranges in a profile: of NVTX on a GPU; elsewhere they are nothing."""

from __future__ import annotations

from ortrain.extras import require

require("torch", __name__)

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def torch_nvtx_range_push(msg: str) -> None:
    """Begins a range of that name."""
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_push(msg)


def torch_nvtx_range_pop() -> None:
    """Ends the range that began last."""
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_pop()


def nvtx_function_decorator(func: _Function) -> _Function:
    """A function whose calls are ranges of its qualified name."""

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        torch_nvtx_range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            torch_nvtx_range_pop()

    return call  # type: ignore[return-value]

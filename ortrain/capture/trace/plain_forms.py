"""Operators that a trace can record, in the place of others that do the same.

- Code that takes a generator often has none (``torch.randn(shape, generator=None)``). PyTorch goes
  to operators of their own there, which take no symbolic sizes or draw for themselves; with
  ``generator=`` left out the numbers are those of its default generator as well.
- ``x.random_(0, 4)`` is an operator whose name (``random_.from``) no traced code can hold, so it is
  ``x.copy_(torch.randint(0, 4, x.shape))``.
- ``x.fill_diagonal_(0)`` asks for the sizes of a matrix as numbers, which would hold for no others;
  ``x.diagonal().fill_(0)`` does not. So does ``max_pool1d`` of the length that it is to pool, and
  ``max_pool2d``, which PyTorch runs in its place where gradients are asked for, does not.
"""

from __future__ import annotations

from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_POOLS: tuple[Any, ...] = (functional.max_pool1d, torch.max_pool1d)
_INDICES = "return_indices"


class PlainForms(TorchFunctionMode):
    """Has functions that are called inside be others that a trace can record."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls the function, or what does the same, without a generator that is None."""
        kwargs = kwargs or {}
        if isinstance(function, BuiltinFunctionType | MethodDescriptorType):
            kwargs = {n: v for n, v in kwargs.items() if n != "generator" or v is not None}
        if function is Tensor.random_ and len(bounds := _bounds(*args[1:], **kwargs)) == 2:
            tensor = args[0]
            low, high = bounds
            whole = torch.randint(low, high, tensor.shape, device=tensor.device)
            return tensor.copy_(whole)
        if function is Tensor.fill_diagonal_ and args[0].ndim == 2:
            return _with_diagonal(function, *args, **kwargs)
        if function in _POOLS and len(args) < 7 and not kwargs.get(_INDICES):
            return _pooled_as_images(*args, **{n: v for n, v in kwargs.items() if n != _INDICES})
        return function(*args, **kwargs)


def _pooled_as_images(
    signal: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """The largest numbers of the windows of a signal, as of images of one row."""
    size = _of_images(kernel_size, 1)
    strides = _of_images(stride, 1) if stride else size
    images = signal.unsqueeze(-2)
    pads, steps = _of_images(padding, 0), _of_images(dilation, 1)
    return functional.max_pool2d(images, size, strides, pads, steps, ceil_mode).squeeze(-2)


def _of_images(size: Any, rows: int) -> tuple[int, int]:
    return rows, size if isinstance(size, int) else size[0]


def _with_diagonal(function: Any, matrix: Tensor, fill_value: Any, wrap: bool = False) -> Tensor:
    if wrap:  # goes on below a square
        filled: Tensor = function(matrix, fill_value, wrap)
        return filled
    matrix.diagonal().fill_(fill_value)
    return matrix


def _bounds(*positional: Any, **named: Any) -> tuple[Any, ...]:
    """Both bounds of a range, where ``random_`` is given both and no generator; else nothing."""
    found = (*positional, *(named[name] for name in ("from", "to") if name in named))
    return () if "generator" in named or None in found or len(found) != 2 else found


__all__ = ["PlainForms"]

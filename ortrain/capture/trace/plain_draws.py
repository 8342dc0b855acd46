"""Random draws by the operators that a trace can record, in the place of others that draw the same.

Code that takes a generator often has none (``torch.randn(shape, generator=None)``). PyTorch goes
to operators of their own there, which take no symbolic sizes or draw for themselves; with
``generator=`` left out the numbers are those of its default generator as well. ``x.random_(0, 4)``
is an operator whose name (``random_.from``) no traced code can hold, so it is
``x.copy_(torch.randint(0, 4, x.shape))``.
"""

from __future__ import annotations

from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class PlainDraws(TorchFunctionMode):
    """Has draws inside be those of PyTorch's default generator, wherever no other is given."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls the function, without a generator that is None."""
        kwargs = kwargs or {}
        if isinstance(function, BuiltinFunctionType | MethodDescriptorType):
            kwargs = {n: v for n, v in kwargs.items() if n != "generator" or v is not None}
        if function is Tensor.random_ and len(bounds := _bounds(*args[1:], **kwargs)) == 2:
            tensor = args[0]
            low, high = bounds
            whole = torch.randint(low, high, tensor.shape, device=tensor.device)
            return tensor.copy_(whole)
        return function(*args, **kwargs)


def _bounds(*positional: Any, **named: Any) -> tuple[Any, ...]:
    """Both bounds of a range, where ``random_`` is given both and no generator; else nothing."""
    found = (*positional, *(named[name] for name in ("from", "to") if name in named))
    return () if "generator" in named or None in found or len(found) != 2 else found


__all__ = ["PlainDraws"]

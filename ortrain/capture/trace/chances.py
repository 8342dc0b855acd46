"""How likely a branch is that a random number decides: ``if torch.rand([]) < self.layerdrop``.

Where a module draws which of its twelve layers it leaves out, each with a tenth of probability, a
graph that has all of them is that of 28 % of the calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Comparisons with a number x: the probability that they hold for what is uniform in [0, 1).
_BELOW: dict[Any, bool] = {
    **dict.fromkeys((Tensor.lt, Tensor.le, Tensor.__lt__, Tensor.__le__, torch.lt, torch.le), True),
    **dict.fromkeys(
        (Tensor.gt, Tensor.ge, Tensor.__gt__, Tensor.__ge__, torch.gt, torch.ge), False
    ),
}
# What returns the number that it is given.
_SAME: set[Callable[..., Any]] = {
    Tensor.detach, Tensor.reshape, Tensor.to, Tensor.view, Tensor.squeeze, Tensor.clone,
    Tensor.cpu, Tensor.float, Tensor.double,
}  # fmt: skip


class Draws(TorchFunctionMode):
    """Follows uniform random numbers, one at a time, to what is asked of them."""

    def __init__(self) -> None:
        super().__init__()
        # By identity, with the tensors themselves, so that none takes the place of another.
        self._uniform: dict[int, Tensor] = {}
        self._chances: dict[int, tuple[Tensor, float]] = {}

    def chance(self, answer: Tensor) -> float | None:
        """The probability that this answer is true; None where no random number decides it."""
        found = self._chances.get(id(answer))
        return None if found is None else found[1]

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs a function, and takes note of what it makes of a random number."""
        result = function(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or result.numel() != 1:
            return result
        first = args[0] if args else None
        if function is torch.rand or (function in _SAME and id(first) in self._uniform):
            self._uniform[id(result)] = result
        elif function in _SAME and id(first) in self._chances:
            self._chances[id(result)] = result, self._chances[id(first)][1]
        elif function in _BELOW and id(first) in self._uniform and len(args) > 1:
            bound = args[1]
            if isinstance(bound, int | float):
                below = min(max(float(bound), 0.0), 1.0)
                self._chances[id(result)] = result, below if _BELOW[function] else 1 - below
        return result

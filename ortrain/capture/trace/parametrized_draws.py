"""Random draws whose parameters are tensors: drawn with the usual ones, then moved.

``noise.uniform_(-bound, bound)`` asks a tensor ``bound`` for its number, which a trace does not
know; so does the hook of transformers that adds NEFTune's noise. While a module is traced, the call
is ::

    noise.uniform_().mul_(2 * bound).add_(-bound)

of the same distribution, with the bound in the graph. PyTorch takes scalars without a gradient
there, and refuses other tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


class ParametrizedDraws(TorchFunctionMode):
    """Takes the parameters out of draws inside, where one of them is a tensor."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        moved = _MOVED.get(func)
        if moved is not None and any(map(_is_scalar, (*args[1:], *kwargs.values()))):
            return moved(func, *args, **kwargs)
        return func(*args, **kwargs)


def _uniform(
    draw: Callable[..., Tensor], tensor: Tensor, low: Any = 0.0, high: Any = 1.0, **more: Any
) -> Tensor:
    low, high = more.pop("from", low), more.pop("to", high)
    _expect(low <= high, "uniform_ between bounds of which the lower one is not above the other")
    return draw(tensor, **more).mul_(high - low).add_(low)


def _normal(
    draw: Callable[..., Tensor], tensor: Tensor, mean: Any = 0.0, std: Any = 1.0, **more: Any
) -> Tensor:
    _expect(std >= 0, "normal_ with a standard deviation that is not negative")
    return draw(tensor, **more).mul_(std).add_(mean)


def _exponential(
    draw: Callable[..., Tensor], tensor: Tensor, lambd: Any = 1.0, **more: Any
) -> Tensor:
    _expect(lambd > 0, "exponential_ at a positive rate")
    return draw(tensor, **more).div_(lambd)


def _expect(condition: Any, what: str) -> None:
    """A condition without which PyTorch raises its error: it becomes a check of the graph."""
    if not condition:
        raise RuntimeError(f"expected {what}")


def _is_scalar(value: Any) -> bool:
    """Whether PyTorch would ask a parameter for its number."""
    return isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad


_MOVED: dict[Any, Callable[..., Tensor]] = {
    Tensor.uniform_: _uniform,
    Tensor.normal_: _normal,
    Tensor.exponential_: _exponential,
}

__all__ = ["ParametrizedDraws"]

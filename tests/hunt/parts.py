"""What generated modules are made of, beside torch's own: custom functions, a block, hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Scaled(torch.autograd.Function):
    """A product, half of whose gradient is passed on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, share: float) -> Tensor:
        ctx.save_for_backward(x, gain)
        ctx.share = share
        return x * gain

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, gain = ctx.saved_tensors
        return gradient * gain * ctx.share, (gradient * x).sum((0, 1)), None


class Topped(torch.autograd.Function):
    """Two results, one of whole numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        top = x.argmax(-1)
        ctx.mark_non_differentiable(top)
        ctx.save_for_backward(x)
        return x.tanh(), top

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * (1 - x.tanh().square()) * 2


class Block(nn.Module):
    """A residual layer, by a number of its own."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), scale

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x)) * self.scale

    def twice(self, x: Tensor) -> Tensor:
        return self(self(x))  # type: ignore[no-any-return]


class LazyLinear(nn.LazyLinear):
    """Draws its weights from a generator of its own: masks before them may be drawn otherwise."""

    def reset_parameters(self) -> None:
        with torch.random.fork_rng([]):
            torch.manual_seed(self.out_features)
            super().reset_parameters()


class LazyConv1d(nn.LazyConv1d):
    """As :class:`LazyLinear`."""

    def reset_parameters(self) -> None:
        with torch.random.fork_rng([]):
            torch.manual_seed(self.out_channels)
            super().reset_parameters()


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def halve(module: nn.Module, args: Any) -> Any:
    return tuple(each * 0.5 for each in args)


def double_gradient(module: nn.Module, given: Any, taken: Any) -> Any:
    return tuple(None if each is None else each * 2 for each in given)


def masked(n: int, length: int) -> dict[str, Tensor]:
    """The keyword of a mask, now and then."""
    return {"mask": torch.rand(n, length) > 0.3} if length % 2 else {}

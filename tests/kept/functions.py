"""Custom autograd functions whose backward is not the derivative of their forward, by kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Scaled(torch.autograd.Function):
    """Saves its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * torch.cos(x) * 3


class SavesOutput(torch.autograd.Function):
    """Saves what it returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x) + 1
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return gradient * y


class SavesBetween(torch.autograd.Function):
    """Saves a tensor in between, and keeps another as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        h = torch.sin(x)
        ctx.save_for_backward(h)
        ctx.shape, ctx.other = x.shape, h + 1
        return h * h

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (h,) = ctx.saved_tensors
        return (gradient * h + ctx.other).view(ctx.shape)


class ReturnsSaved(torch.autograd.Function):
    """Its gradient is a tensor that was saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.sin(x))
        return x + 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.saved_tensors[0]


class StraightThrough(torch.autograd.Function):
    """Hands on the gradient that comes in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


class Viewed(torch.autograd.Function):
    """Returns a view of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -gradient


class Same(Viewed):
    """Returns its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x


class Transposed(Viewed):
    """Returns what does not lie row by row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 2).t().contiguous().t()


class Apart(torch.autograd.Function):
    """Makes its context in ``setup_context``; has a default."""

    @staticmethod
    def forward(x: Tensor, factor: float = 2.0) -> Tensor:  # type: ignore[override]
        return x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.clamp(-0.01, 0.01) * ctx.factor, None


class Several(torch.autograd.Function):
    """Several outputs of different shapes and dtypes, a number and None among its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int, nothing: None) -> Any:
        ctx.power = power
        ctx.save_for_backward(x)
        indices = x.argmax(-1)
        ctx.mark_non_differentiable(indices)
        return x**power, x.sum(-1), indices

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] * ctx.power + gradients[1].unsqueeze(-1) * x, None, None


class NotMaterialized(torch.autograd.Function):
    """Is told of outputs that receive no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        return sum(g * f for g, f in ((first, 5), (second, 7)) if g is not None)


class Blocked(torch.autograd.Function):
    """A floating output that is not differentiable, and an argument without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        scale = x.abs().mean()
        ctx.mark_non_differentiable(scale)
        return x * y, scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        return gradient * 2, None


class AsksWhatIsNeeded(torch.autograd.Function):
    """Has gradients for what needs one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, y = ctx.saved_tensors
        first, second = ctx.needs_input_grad
        return (gradient * y * 2 if first else None, gradient * x * 3 if second else None)


class ValueInBackward(Scaled):
    """Its backward branches on values."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 2 if float(gradient.sum()) > 0 else gradient * 3


class Nested(torch.autograd.Function):
    """Differentiates inside of its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.exp(-x * x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad(torch.sin(leaf), leaf, gradient)[0]


class AsksLayout(torch.autograd.Function):
    """Asks how tensors lie in memory, as one with a kernel of its own does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        buffer = torch.empty(x.shape[0], 2 * x.shape[1])
        part = buffer[:, : x.shape[1]]
        torch.mul(x, float(part.stride(0) // x.shape[1]), out=part)
        return part.clone() if part.storage_offset() == 0 else part

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * 2 + x * 0


class GoesByLayout(torch.autograd.Function):
    """Computes something else where what it is given lies otherwise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2 if x.is_contiguous() else x * 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 2


def _first(function: Any) -> Any:
    return lambda x, h: function.apply(h)


# Each takes the input of the module and what a layer has made of it, both [rows, 8], and gives one
# of that shape.
KINDS: dict[str, Any] = {
    "saves its input": _first(Scaled),
    "saves its output": _first(SavesOutput),
    "saves in between": _first(SavesBetween),
    "returns what it saved": _first(ReturnsSaved),
    "hands on the gradient": _first(StraightThrough),
    "returns a view": _first(Viewed),
    "returns its input": _first(Same),
    "returns other strides": _first(Transposed),
    "setup_context": _first(Apart),
    "setup_context, by keyword": lambda x, h: Apart.apply(h, factor=0.5),
    "several outputs": lambda x, h: _joined(Several.apply(h, 3, None)),
    "one of several outputs": lambda x, h: Several.apply(h, 2, None)[0],
    "gradients that are not materialized": lambda x, h: NotMaterialized.apply(h)[1],
    "an output without a gradient": lambda x, h: _blocked(*Blocked.apply(h, x)),
    "needs_input_grad of one": lambda x, h: AsksWhatIsNeeded.apply(h, x.detach()),
    "needs_input_grad of two": lambda x, h: AsksWhatIsNeeded.apply(h, x),
    "a value in its backward": _first(ValueInBackward),
    "autograd in its backward": _first(Nested),
    "twice": lambda x, h: Scaled.apply(Scaled.apply(h)),
    "twice on one tensor": lambda x, h: Scaled.apply(h) + Apart.apply(h) * Scaled.apply(x),
    "one tensor twice": lambda x, h: AsksWhatIsNeeded.apply(h, h),
    "asks for strides": _first(AsksLayout),
}
# Bound to a name before the trace, as scripts do.
_SCALED, _APART, _SEVERAL, _BLOCKED = Scaled.apply, Apart.apply, Several.apply, Blocked.apply
_SAME, _ONE, _ASKS = Same.apply, NotMaterialized.apply, AsksWhatIsNeeded.apply
BOUND: dict[str, Any] = {
    "bound: saves its input": lambda x, h: _SCALED(h),
    "bound: returns its input": lambda x, h: _SAME(h),
    "bound: setup_context, by keyword": lambda x, h: _APART(h, factor=0.5),
    "bound: several outputs": lambda x, h: _joined(_SEVERAL(h, 3, None)),
    "bound: not materialized": lambda x, h: _ONE(h)[1],
    "bound: an output without a gradient": lambda x, h: _blocked(*_BLOCKED(h, x)),
    "bound: needs_input_grad": lambda x, h: _ASKS(h, x),
    "bound: twice": lambda x, h: _SCALED(_SCALED(h)),
}
KINDS |= BOUND


def _joined(outputs: Any) -> Tensor:
    cubes, sums, places = outputs
    result: Tensor = cubes * sums.unsqueeze(-1) + places.unsqueeze(-1)
    return result


def _blocked(product: Tensor, scale: Tensor) -> Tensor:
    return product * scale

"""What a trace would take apart wrongly is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.bloom.modeling_bloom import GeLUFunction

from ortrain.capture.export import capture
from ortrain.capture.trace import exporter
from ortrain.errors import CaptureError


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 100


class WithFunction(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Scaled.apply(x)
        return result


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.linear, self.reentrant = nn.Linear(4, 4), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(self.linear, x, use_reentrant=self.reentrant)
        return result


def test_a_custom_autograd_function_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"custom autograd function .*Scaled"):
        capture(WithFunction(), (torch.randn(3, 4),))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Clipped(Square):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return (2 * x * gradient).clamp(-100, 100)


class Calls(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.function.apply(x)
        return result


class Swish(Square):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return gradient * (s * (1 + x * (1 - s)))


class SquareApart(Square):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        (x,) = inputs
        ctx.save_for_backward(x)


class TanhApart(SquareApart):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.tanh(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return gradient * (1 - y * y)


@pytest.mark.parametrize(
    ("function", "operator"),
    [(Square, "Mul"), (Swish, "Mul"), (GeLUFunction, "Mul"), (SquareApart, "Mul"),
     (TanhApart, "Tanh")],
)  # fmt: skip
def test_a_function_that_is_proven_to_be_its_derivative_is_captured(
    function: type[torch.autograd.Function], operator: str
) -> None:
    captured = capture(Calls(function), (torch.randn(3, 4),))
    assert operator in captured.program.operators()


class ClippedByTanh(Square):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return torch.tanh(2 * x * gradient * 1e-9) * 1e9


class ClippedInPython(Square):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient if gradient.abs().max() < 1000 else gradient


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class OffForNegatives(Square):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * torch.where(x < -500, x * 0, x) * gradient


class OffForLarge(Square):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient * torch.sigmoid(1000 - x)


SCALE = 1.0


class ScaledFromOutside(Square):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient * SCALE


class OffForMatrices(Square):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient if gradient.dim() == 1 else gradient


class OffWhereFrozen(Square):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient * len(ctx.needs_input_grad)


class ClippedApart(SquareApart):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return (2 * x * gradient).clamp(-100, 100)


class SavesAnother(SquareApart):
    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)


class SavesWhatIsOutside(SquareApart):
    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        (x,) = inputs
        ctx.save_for_backward(x * SCALE)


class SavesInPython(SquareApart):
    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        (x,) = inputs
        ctx.save_for_backward(x if x.dim() == 1 else output)


@pytest.mark.parametrize(
    "function",
    [Clipped, ClippedByTanh, ClippedInPython, Reversed, Rounded, OffForNegatives, OffForLarge,
     ScaledFromOutside, OffForMatrices, OffWhereFrozen, ClippedApart, SavesAnother,
     SavesWhatIsOutside, SavesInPython],
)  # fmt: skip
def test_a_function_that_may_not_be_its_derivative_somewhere_is_refused(
    function: type[torch.autograd.Function],
) -> None:
    with pytest.raises(CaptureError, match=rf"custom autograd function .*{function.__name__}"):
        capture(Calls(function), (torch.randn(3, 4),))


square = Square.apply


def test_a_function_bound_before_the_trace_is_proven_as_others_are() -> None:
    class Squares(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = square(x)
            return result

    captured = capture(Squares(), (torch.randn(3, 4),))
    assert "Mul" in captured.program.operators()
    assert vars(Square)["forward"].__func__.__qualname__ == "Square.forward"


class Mapped(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 100


scaled = Scaled.apply
scaled_in_part = functools.partial(Scaled.apply)
scaled_in_c = torch._C._FunctionBase.__dict__["apply"].__get__(None, Scaled)


def by_default(x: torch.Tensor, function: Any = Scaled.apply) -> Any:
    return function(x)


class Reaches(nn.Module):
    def __init__(self, way: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.function, self.way = Scaled.apply, way

    def forward(self, x: torch.Tensor) -> Any:
        return self.way(self, x)


WAYS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "a global": lambda self, x: scaled(x),
    "an attribute": lambda self, x: self.function(x),
    "a partial": lambda self, x: scaled_in_part(x),
    "a default": lambda self, x: by_default(x),
    "C": lambda self, x: scaled_in_c(x),
    "a checkpoint": lambda self, x: checkpoint(scaled, x, use_reentrant=False),
    "a context of its own": lambda self, x: Mapped.apply(x),
    "a gradient": lambda self, x: torch.func.grad(lambda y: Mapped.apply(y).sum())(x),
    "a map": lambda self, x: torch.vmap(Mapped.apply)(x),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_custom_function_is_found_however_it_is_reached(way: str) -> None:
    with pytest.raises(CaptureError):
        capture(Reaches(WAYS[way]), (torch.randn(3, 4),))


def test_a_custom_function_is_found_where_dynamo_traces() -> None:
    module = Reaches(lambda self, x: scaled(x))
    with pytest.raises(CaptureError, match="custom autograd function"):
        exporter.export(module, (torch.randn(3, 4),), {}, ({},), strict=True)


def test_a_function_without_gradients_is_captured() -> None:
    with torch.no_grad():
        captured = capture(WithFunction(), (torch.randn(3, 4),))
    assert captured.program.operators() == {"Mul": 1}


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_is_captured(reentrant: bool) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    captured = capture(Checkpointed(reentrant), (x,))
    assert {v.name for v in captured.program.inputs()} == {"x", "linear.weight", "linear.bias"}


def test_functions_work_again_after_a_refusal() -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(CaptureError):
        capture(WithFunction(), (x,))
    Scaled.apply(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [100.0, 100.0]

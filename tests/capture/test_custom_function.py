"""What a trace would take apart wrongly is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ortrain.capture.export import capture
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


def test_a_function_whose_backward_is_the_derivative_of_its_forward_is_captured() -> None:
    captured = capture(Calls(Square), (torch.randn(3, 4),))
    assert "Mul" in captured.program.operators()


def test_a_function_that_clips_large_gradients_is_refused() -> None:
    with pytest.raises(CaptureError, match="not the derivative"):
        capture(Calls(Clipped), (torch.randn(3, 4),))


def test_reentrant_checkpointing_is_refused_with_the_way_out() -> None:
    with pytest.raises(CaptureError, match="use_reentrant=False"):
        capture(Checkpointed(reentrant=True), (torch.randn(3, 4),))


def test_checkpointing_without_reentrance_is_captured() -> None:
    captured = capture(Checkpointed(reentrant=False), (torch.randn(3, 4),))
    assert {v.name for v in captured.program.inputs()} == {"x", "linear.weight", "linear.bias"}


def test_functions_work_again_after_a_refusal() -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(CaptureError):
        capture(WithFunction(), (x,))
    Scaled.apply(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [100.0, 100.0]

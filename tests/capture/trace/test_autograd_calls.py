"""What a forward asks of autograd, and a graph would not do, is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import graph

from ortrain.capture.export import capture
from ortrain.capture.trace import exporter
from ortrain.errors import CaptureError


class Body(nn.Module):
    def __init__(self, body: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.body = nn.Parameter(torch.ones(4)), body

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self, x)


def after(act: Callable[[torch.Tensor], object]) -> Callable[[Any, torch.Tensor], Any]:
    """A forward that does something with its result, and returns it."""

    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = (x * self.weight).exp()
        act(y)
        return y

    return body


def on_weight(act: Callable[[torch.Tensor], object]) -> Callable[[Any, torch.Tensor], Any]:
    """A forward that does something with its parameter."""

    def body(self: Any, x: torch.Tensor) -> Any:
        act(self.weight)
        return x * self.weight

    return body


def with_half_saved(self: Any, x: torch.Tensor) -> torch.Tensor:
    with graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        return torch.exp(x * self.weight)


def at_argument(self: Any, x: torch.Tensor) -> Any:
    x.requires_grad_()
    return x * self.weight


def gradient(self: Any, x: torch.Tensor) -> torch.Tensor:
    energy = (x * self.weight).exp().sum()
    return torch.autograd.grad(energy, self.weight, create_graph=True)[0]


def no_matter(*_: Any) -> None:
    pass


REFUSED: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "a hook": (after(lambda y: y.register_hook(lambda g: g * 2)), "registers a hook"),
    "a hook on a parameter": (on_weight(lambda w: w.register_hook(lambda g: g * 2)), "a hook"),
    "a hook behind": (
        on_weight(lambda w: w.register_post_accumulate_grad_hook(no_matter)), "a hook"),
    "a hook on a node": (after(lambda y: y.grad_fn.register_prehook(no_matter)), "grad_fn"),
    "hooks on many": (after(lambda y: graph.register_multi_grad_hook([y], no_matter)), "grad_fn"),
    "hooks on saved": (with_half_saved, "hooks on the tensors that autograd saves"),
    "retain_grad": (after(lambda y: y.retain_grad()), "retain_grad"),
    "backward": (after(lambda y: y.sum().backward(retain_graph=True)), "computes gradients"),
    "backward of autograd": (
        after(lambda y: torch.autograd.backward(y.sum(), retain_graph=True)), "computes gradients"),
    "grad": (gradient, "computes gradients"),
    "requires_grad_": (at_argument, "requires_grad of an argument"),
    "freezing": (on_weight(lambda w: w.requires_grad_(False)), "requires_grad of an argument"),
    "setting": (on_weight(lambda w: setattr(w, "requires_grad", False)), "requires_grad of an"),
    "reading grad": (on_weight(lambda w: w.grad), r"the \.grad"),
    "setting data": (after(lambda y: setattr(y, "data", y * 2)), r"the \.data"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_into_autograd_is_refused(name: str) -> None:
    body, what = REFUSED[name]
    module, x = Body(body), torch.ones(3, 4)
    with pytest.raises(CaptureError, match=what):
        capture(module, (x,))
    assert module.weight.requires_grad
    assert module.weight.grad is None
    assert not x.requires_grad


@pytest.mark.parametrize("name", ["a hook", "hooks on saved", "backward", "freezing"])
def test_a_call_into_autograd_is_refused_where_dynamo_traces(name: str) -> None:
    body, what = REFUSED[name]
    module = Body(body)
    with pytest.raises(CaptureError, match=what):
        exporter.export(module, (torch.ones(3, 4),), {}, ({},), strict=True)
    assert module.weight.requires_grad
    assert module.weight.grad is None


def on_cpu(self: Any, x: torch.Tensor) -> torch.Tensor:
    with graph.save_on_cpu():
        return torch.exp(x * self.weight)


CAPTURED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "a flag of its own": lambda self, x: (x * 2).requires_grad_() * self.weight,
    "saving elsewhere": on_cpu,
    "a flag as it is": on_weight(lambda w: w.requires_grad_()),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_a_call_that_changes_no_gradient_is_captured(name: str) -> None:
    capture(Body(CAPTURED[name]), (torch.ones(3, 4),))


def test_data_is_a_constant_for_the_gradient() -> None:
    captured = capture(Body(lambda self, x: x * self.weight.data), (torch.ones(3, 4),))
    assert "ortrain::StopGradient" in captured.program.operators()

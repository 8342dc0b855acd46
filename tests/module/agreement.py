"""How close a graph must come to eager: one training step of both, and every tolerance."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ortrain import Options, ORTModule

# The graph or an error, with no contest in between.
GRAPH = Options(engine="onnxruntime", fallback="raise")

# Largest error of a tensor, relative to its largest value. Where float32 itself is further from
# float64, eager's own distance counts, times SLACK: two orders of summation differ from each other
# as much as each does from the truth.
RELATIVE = 1e-5
SLACK = 2.0
# Where a test is about something else than numbers: relative to the tensor's largest value.
SAME = 2e-5
# A gradient whose true value is zero has no largest value of its own: roundings of the largest
# gradient of the module are what is left, and what one of them may be.
ZERO = 1e-12
ROUNDING = 1e-6
# Over twenty steps of AdamW, which divides by the gradient's own size and so magnifies roundings
# of small ones, weights drift apart: what a gradient's error may be, relative to the tensor's
# largest value, and the error of the weights in the end, relative to the way they came.
DRIFTED = 5e-4


@dataclass
class Outcome:
    """One training step.

    Attributes:
        loss: its value.
        gradients: of every parameter, None where there is none.
        buffers: of the module, afterwards.
    """

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]

    @classmethod
    def of(cls, module: nn.Module, loss: torch.Tensor) -> Outcome:
        """What a module holds after a backward."""
        return cls(
            loss.detach(),
            {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()},
            {n: b.clone() for n, b in module.named_buffers()},
        )


def loss_of(output: Any) -> torch.Tensor:
    """The loss in a module's output."""
    loss = output["loss"] if isinstance(output, dict) else output
    loss = loss[0] if isinstance(loss, tuple) else loss
    assert isinstance(loss, torch.Tensor)
    return loss


def step(module: nn.Module, batch: dict[str, torch.Tensor]) -> Outcome:
    """One forward and backward from empty gradients; an ORTModule's are a graph's.

    Raises:
        AssertionError: PyTorch has run a step that was to be compared with it.
    """
    module.zero_grad()
    loss = loss_of(module(**batch))
    loss.backward()
    if isinstance(module, ORTModule):
        assert module.report.mode == "graph", module.report.reason
    return Outcome.of(module, loss)


def double(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch for a module in float64."""
    return {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def in_double(module: nn.Module) -> nn.Module:
    """A copy of a module in float64."""
    return copy.deepcopy(module).double()


def assert_agree(
    ours: Outcome, eager: Outcome, truth: Outcome, *, relative: float = RELATIVE
) -> None:
    """Raises where the graph's step is further from float64 than allowed.

    Args:
        ours: of the graph.
        eager: of eager in float32.
        truth: of eager in float64.
        relative: what a gradient's error may be; more where weights have drifted apart before.
    """
    _assert_close("loss", ours.loss, eager.loss, truth.loss)
    missing = {n for n, g in ours.gradients.items() if g is None}
    assert missing == {n for n, g in eager.gradients.items() if g is None}
    largest = largest_gradient(truth)
    for name, gradient in ours.gradients.items():
        mine, exact = eager.gradients[name], truth.gradients[name]
        if gradient is not None and mine is not None and exact is not None:
            zero = float(exact.abs().max()) <= ZERO * largest
            floor = ROUNDING * largest if zero else 0.0
            _assert_close(name, gradient, mine, exact, relative=relative, floor=floor)
    for name, buffer in ours.buffers.items():
        _assert_close(name, buffer, eager.buffers[name], truth.buffers[name])


def assert_trained_alike(
    ours: nn.Module, truth: nn.Module, start: nn.Module, vain: dict[str, torch.Tensor]
) -> None:
    """Raises where trained weights are further from float64's than allowed.

    Args:
        ours: of the graph.
        truth: of eager in float64.
        start: where both began.
        vain: of each parameter, the elements whose true gradient is zero; AdamW has moved them by
            roundings alone, and `assert_agree` has compared their gradients.
    """
    exact, origin = dict(truth.named_parameters()), dict(start.named_parameters())
    for name, weight in ours.named_parameters():
        live = ~vain.get(name, torch.zeros_like(weight, dtype=torch.bool))
        error = float((weight.detach().double() - exact[name].detach())[live].norm())
        way = float((exact[name] - origin[name])[live].detach().norm())
        assert error <= DRIFTED * way, f"{name}: {error:.2e} from float64 after a way of {way:.2e}"


def vain_elements(truth: Outcome) -> dict[str, torch.Tensor]:
    """Of each float64 gradient, the elements that are zero but for roundings (a bias of keys)."""
    bound = ZERO * largest_gradient(truth)
    return {
        name: (g != 0) & (g.abs() <= bound) for name, g in truth.gradients.items() if g is not None
    }


def largest_gradient(outcome: Outcome) -> float:
    """Largest magnitude in all gradients."""
    return max(float(g.abs().max()) for g in outcome.gradients.values() if g is not None)


def _assert_close(
    name: str,
    ours: torch.Tensor,
    eager: torch.Tensor,
    truth: torch.Tensor,
    *,
    relative: float = RELATIVE,
    floor: float = 0.0,
) -> None:
    assert ours.shape == eager.shape, name
    assert ours.dtype == eager.dtype, name
    if not ours.is_floating_point():
        assert torch.equal(ours, eager), name
        return
    exact = truth.double()
    error = float((ours.double() - exact).abs().max())
    own = float((eager.double() - exact).abs().max())
    allowed = max(relative * float(exact.abs().max()), SLACK * own, floor)
    assert error <= allowed, f"{name}: {error:.2e} from float64, allowed {allowed:.2e}"


class Called(nn.Module):
    """A module that calls a function on tensors."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)

"""Code compiled through the backend, and which of its graphs a step of ours runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ortrain.frontend.backend import InPyTorch, ortrain


class Doubled(torch.autograd.Function):
    """Has its argument as it is, and not through a function of PyTorch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def compiled(
    code: Any,
    engine: str = "aten",
    into: list[Any] | None = None,
    dynamic: bool | None = None,
) -> tuple[Callable[..., Any], list[bool]]:
    """The code, and for each graph made of it whether a step of ours runs it, or a part.

    Args:
        code: a module or a function.
        engine: of steps.
        into: what is made is noted here, too.
        dynamic: of ``torch.compile``.
    """
    made: list[bool] = []

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found = ortrain(module, inputs, options={"engine": engine})
        made.append(not isinstance(found, InPyTorch))
        if into is not None:
            into.append(found)
        return found

    torch._dynamo.reset()
    return torch.compile(code, backend=backend, dynamic=dynamic), made


def left(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """What a step leaves: the loss, gradients and buffers."""
    grads = {f"gradient of {n}": p.grad for n, p in module.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads, **dict(module.named_buffers())}


def expect_equal(ours: dict[str, Tensor], eager: dict[str, Tensor]) -> None:
    """Equal but for roundings, which gradients that are zero consist of."""
    assert list(ours) == list(eager)
    gradients = [float(t.abs().max()) for n, t in eager.items() if n.startswith("gradient")]
    largest = max(gradients, default=1.0)
    for name, tensor in eager.items():
        assert ours[name].dtype == tensor.dtype
        assert ours[name].shape == tensor.shape
        torch.testing.assert_close(
            ours[name], tensor, rtol=2e-4, atol=2e-6 * max(largest, 1.0), msg=name
        )


def expect_equal_steps(
    module: nn.Module,
    call: Callable[..., Any],
    eager: nn.Module,
    loss_of: Callable[[Callable[..., Any]], Tensor],
    *,
    twice: bool = False,
) -> None:
    """A step of a module through what is compiled, and one of its copy, leave the same.

    Args:
        module: that is compiled.
        call: what is compiled of it.
        eager: its copy.
        loss_of: the loss of a call.
        twice: whether the backward runs twice.
    """
    found = []
    for each, run in ((module, call), (eager, eager)):
        each.zero_grad()
        loss = loss_of(run)
        loss.backward(retain_graph=twice)
        if twice:
            loss.backward()
        found.append(left(each, loss))
    expect_equal(*found)


def both_found(
    call: Callable[[Tensor], Tensor],
    eager: Callable[[Tensor], Tensor],
    rows: int,
    weights: Sequence[nn.Parameter],
) -> list[tuple[Tensor | None, ...]]:
    """What two functions of random rows give: the loss, and gradients of the rows and the weights.

    Args:
        call: what is compiled.
        eager: the function.
        rows: of four numbers in float64; their count is the seed.
        weights: that the functions read.
    """
    found = []
    for run in (call, eager):
        torch.manual_seed(rows)
        x = torch.randn(rows, 4, dtype=torch.float64, requires_grad=True)
        for weight in weights:
            weight.grad = None
        loss = run(x)
        loss.backward()
        found.append((loss.detach(), x.grad, *[weight.grad for weight in weights]))
    return found

"""Hooks on tensors run where PyTorch runs them: with a gradient, and as often."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule


class Heads(nn.Module):
    """Three outputs, none of which depends on all of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right, self.apart = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.left(hidden), self.right(hidden), self.apart(y)


def told(heard: list[Any], name: str, hook: str) -> Callable[[Tensor], Any]:
    """Hears of a tensor or its gradient, as a hook that never reckons with None."""

    def hear(tensor: Tensor) -> Tensor | None:
        gradient = tensor.grad if hook.startswith("register_post") else tensor
        assert gradient is not None
        heard.append((name, gradient.norm().item()))
        return gradient * 2 if hook == "register_hook" else None

    return hear


def trained(run: Any, module: nn.Module, hook: str, *, frees: bool) -> tuple[list[Any], Any]:
    heard: list[Any] = []
    steps: list[Any] = []
    for name, parameter in module.named_parameters():
        getattr(parameter, hook)(told(heard, name, hook))
    torch.manual_seed(0)
    chosen = [c for n in (1, 2) for c in itertools.combinations(range(3), n)]
    for outputs in [*chosen, *reversed(chosen)]:
        x, y = torch.randn(2, 3), torch.randn(2, 3, requires_grad=True)
        if hook == "register_hook":
            y.register_hook(told(heard, "y", hook))
        found = run(x, y)
        sum(found[i].square().sum() for i in outputs).backward()
        steps.append(sorted(heard))
        heard.clear()
        if frees:
            module.zero_grad()
    return steps, [p.grad for p in module.parameters()]


@pytest.mark.parametrize("frees", [True, False])
@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
def test_hooks_on_tensors_hear_of_gradients_alone(engine: Any, hook: str, frees: bool) -> None:
    module = Heads()
    plain = copy.deepcopy(module)
    model = ORTModule(module, options=Options(engine=engine))
    ours, gradients = trained(model, module, hook, frees=frees)
    expected, others = trained(plain, plain, hook, frees=frees)
    assert model.report.graph_calls == len(ours) == 12
    for one, other in zip(ours, expected, strict=True):
        assert [name for name, _ in one] == [name for name, _ in other]
        assert [size for _, size in one] == pytest.approx([size for _, size in other], rel=1e-4)
    torch.testing.assert_close(gradients, others)

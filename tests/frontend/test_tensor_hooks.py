"""Hooks on tensors run where PyTorch runs them: with a gradient, and as often."""

from __future__ import annotations

import copy
import itertools
import random
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


Line = tuple[str, int, int]


class Drawn(nn.Module):
    """Operators drawn by chance; results are some of what they make, views and transposed ones."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        drawn = random.Random(seed)
        self.layer = nn.Linear(4, 4)
        self.lines: list[Line] = [
            (drawn.choice([*UNARY, *BINARY, *IN_PLACE]), drawn.randrange(99), drawn.randrange(99))
            for _ in range(drawn.randint(3, 9))
        ]
        self.shown = [drawn.randrange(1, 2 + len(self.lines)) for _ in range(drawn.randint(2, 5))]

    def forward(self, x: Tensor) -> list[Any]:
        made, shows_argument = [x, self.layer(x)], [True, False]
        for name, first, second in self.lines:
            first, second = first % len(made), second % len(made)
            one, other = made[first], made[second]
            shows_argument.append(shows_argument[first] and name in VIEWS)
            if name in UNARY:
                made.append(UNARY[name](one))
            elif name in BINARY:
                made.append(BINARY[name](one, other))
            else:
                own = torch.tanh(one) if shows_argument[first] else one
                made.append(IN_PLACE[name](own, other.mean()))
        return [made[1], x.shape[0], *(made[i] for i in self.shown)]


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "turned": lambda t: t.transpose(0, -1),
    "first": lambda t: t[:1],
    "last half": lambda t: t.chunk(2)[-1],
    "flat": lambda t: t.reshape(-1),
    "sum": lambda t: t.sum(-1, keepdim=True),
    "detached": lambda t: t.detach() * 2,
}
VIEWS = {"turned", "first", "last half", "flat"}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "scaled": lambda one, other: one * other.mean(),
    "shifted": lambda one, other: one + other.square().mean(),
}
IN_PLACE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "doubled": lambda t, _: t.mul_(2),
    "moved": lambda t, by: t.add_(by),
}


def hearing(heard: dict[int, Tensor], number: int) -> Callable[[Tensor | None], Tensor | None]:
    def hear(gradient: Tensor | None) -> Tensor | None:
        if gradient is None:  # of views that are made together, one may have none
            return None
        heard[number] = gradient.clone()
        return gradient * 1.5

    return hear


def looked_at(run: Any, module: nn.Module, how: str, seed: int) -> list[Any]:
    """What is heard of a call's outputs, and the gradients."""
    drawn = random.Random(seed)
    torch.manual_seed(seed)
    found: list[Any] = []
    for _ in range(3):
        module.zero_grad()
        x = torch.randn(drawn.randint(4, 5), 4, requires_grad=True)
        # PyTorch 2.13 crashes where a hook comes to a view whose memory was written to since, if
        # nobody has asked for its grad_fn before.
        outputs = [t for t in run(x * 1) if isinstance(t, Tensor) and t.grad_fn is not None]
        chosen = [t for t in outputs if drawn.random() < 0.7]
        heard: dict[int, Tensor] = {}
        for i, each in enumerate(chosen):
            if how == "hooks":
                each.register_hook(hearing(heard, i))
            elif how == "retain":
                each.retain_grad()
        losses = [(t * torch.rand_like(t)).square().sum() for t in outputs if drawn.random() < 0.8]
        loss = sum(losses, torch.zeros(()))
        if not loss.requires_grad:
            continue
        if how == "grad":
            wanted = [*chosen, x, *module.parameters()]
            found.append(torch.autograd.grad(loss, wanted, allow_unused=True))
            continue
        loss.backward()
        kept = [t.grad for t in chosen] if how == "retain" else []
        found.append([heard, kept, x.grad, *(p.grad for p in module.parameters())])
    return found


@pytest.mark.filterwarnings("ignore:.*the forward writes to a tensor that its backward reads")
@pytest.mark.parametrize("how", ["hooks", "retain", "grad"])
@pytest.mark.parametrize("seed", range(50))
def test_what_comes_to_outputs_of_which_others_are_made_is_heard(seed: int, how: str) -> None:
    plain = Drawn(seed)
    model = copy.deepcopy(plain)
    try:
        tensors = [t for t in plain(torch.randn(4, 4)) if isinstance(t, Tensor)]
        sum(t.sum() for t in tensors).backward()
        expected = looked_at(plain, plain, how, seed)
    except RuntimeError:
        return  # what autograd has saved was written to
    ours = looked_at(ORTModule(model, options=Options(engine="aten")), model, how, seed)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)

"""Parameters and buffers that a module holds a second time, beside their registered names."""

from __future__ import annotations

import copy
import functools
from collections import deque, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from tests.module.agreement import SAME

pytestmark = pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")

ENGINES = ("aten", "onnxruntime")
WIDTH = 5


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


class Plain:
    def __init__(self, held: Any) -> None:
        self.held = held


Pair = namedtuple("Pair", "held other")


class Holding(nn.Module):
    """Reads its weight and a buffer where ``put`` has put them, by ``get``."""

    def __init__(self, put: Callable[[Any, Any], Any], get: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("steps", torch.zeros(WIDTH))
        self.weights = put(self, self.layer.weight)
        self.means = put(self, self.norm.running_mean)
        self.counts = put(self, self.steps)
        self.get = get

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.layer(x)) @ self.get(self.weights)
        if self.training:
            self.get(self.counts).add_(1.0)
        return hidden + self.get(self.means) * 0.5 + self.get(self.counts)


def _closed(module: Any, tensor: Tensor) -> Any:
    return lambda: tensor


def _default(module: Any, tensor: Tensor) -> Any:
    return lambda held=tensor: held


def _keyword_default(module: Any, tensor: Tensor) -> Any:
    return lambda *, held=tensor: held


# Where the tensor is put, and how the forward comes to it.
FOLLOWED: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "an attribute": (lambda module, tensor: Plain(tensor), lambda held: held.held),
    "a slot": (lambda module, tensor: Slotted(tensor), lambda held: held.held),
    "a list": (lambda module, tensor: [tensor], lambda held: held[0]),
    "a deque": (lambda module, tensor: deque([tensor]), lambda held: held[0]),
    "a dictionary": (lambda module, tensor: {"held": tensor}, lambda held: held["held"]),
    "a tuple": (lambda module, tensor: (1, tensor), lambda held: held[1]),
    "any depth": (lambda module, tensor: {"a": [(1, (tensor,))]}, lambda held: held["a"][0][1][0]),
    "a closure": (_closed, lambda held: held()),
    "a default": (_default, lambda held: held()),
    "a keyword's default": (_keyword_default, lambda held: held()),
    "a partial function": (
        lambda module, tensor: functools.partial(torch.Tensor.view_as, tensor, tensor),
        lambda held: held(),
    ),
    "a named tuple": (lambda module, tensor: Pair(tensor, 1), lambda held: held.held),
}  # fmt: skip
REFUSED: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "a method": (lambda module, tensor: tensor.view_as, lambda held: held.__self__),
}
PLACES = FOLLOWED | REFUSED


def batches(count: int = 4) -> list[Tensor]:
    dice = torch.Generator().manual_seed(1)
    return [torch.randn(6 + i % 2, WIDTH, generator=dice) for i in range(count)]


def agree(model: Any, eager: Any, step: Callable[[Any, Tensor], Any] | None = None) -> None:
    """Trains both, evaluates between the steps, and compares all that there is."""
    found = []
    for each in (model, eager):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        values, parameters = list[Tensor](), [*each.parameters()]
        for x in batches():
            each.train()
            optimizer.zero_grad()
            loss = step(each, x) if step is not None else each(x).square().mean()
            loss.backward()
            values += [loss.detach()]
            values += [torch.zeros(1) if p.grad is None else p.grad.clone() for p in parameters]
            optimizer.step()
            each.eval()
            with torch.no_grad():
                values.append(each(x))
        inner = each.module if each is model else each
        found.append([*values, *inner.state_dict().values()])
    for ours, theirs in zip(*found, strict=True):
        error = float((ours - theirs).double().abs().max())
        assert error <= SAME * float(theirs.abs().max()) + 1e-6


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_read_there_is_what_the_registered_name_holds(place: str, engine: Any) -> None:
    eager = Holding(*PLACES[place])
    model = ORTModule(Holding(*PLACES[place]), options=Options(engine=engine))
    agree(model, eager)
    assert model.report.mode == ("graph" if place in FOLLOWED else "eager")
    held = model.module
    assert held.get(held.weights).data_ptr() == held.layer.weight.data_ptr(), "it is left as it was"
    assert held.get(held.counts).data_ptr() == held.steps.data_ptr()


@pytest.mark.parametrize("place", PLACES)
def test_second_derivatives_reach_it(place: str) -> None:
    def penalty(model: Any, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        loss: Tensor = (slope.norm(dim=1) - 1).square().mean() + model(x).square().mean()
        return loss

    eager = Holding(*PLACES[place])
    agree(ORTModule(Holding(*PLACES[place]), options=Options(engine="aten")), eager, penalty)


class Kept(nn.Module):
    """A sub-module that takes a number out of a tensor, and so stays PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.weights = {"w": self.layer.weight}

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights["w"] * (1 + int(x.shape[0] > x.abs().sum().item()))


class Around(nn.Module):
    """Layers around it, which hold some of its tensors too."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.kept, self.last = nn.Linear(WIDTH, WIDTH), Kept(), nn.Linear(WIDTH, WIDTH)
        self.all = [self.kept.layer.weight] if own else []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.kept(torch.tanh(self.first(x)))
        for each in self.all:
            hidden = hidden + each.sum()
        return self.last(hidden)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("own", [False, True], ids=["inside", "around"])
def test_a_sub_module_that_stays_pytorchs_may_hold_its_own(own: bool, engine: Any) -> None:
    agree(ORTModule(Around(own), options=Options(engine=engine)), Around(own))


class Viewing(nn.Module):
    """Reads memory of its weight and of a buffer through tensors of their own."""

    def __init__(self, width: int, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(width, width)
        self.register_buffer("mean", torch.zeros(width, width))
        self.seen = [view(self.layer.weight), view(self.mean)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.seen[0] + x @ self.seen[1]


@pytest.mark.parametrize(
    "view",
    [lambda t: t.data, lambda t: t.detach(), lambda t: t.data.t(), lambda t: t.data[:]],
    ids=["data", "detached", "transposed", "slice"],
)
def test_memory_that_is_shared_with_a_parameter_is_read_as_it_is(view: Any) -> None:
    model = ORTModule(Viewing(WIDTH, view), options=Options(engine="aten"))
    x = torch.ones(2, WIDTH) / WIDTH
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(model(x), model.module(x))
            model.module.layer.weight.data.mul_(1.5)
            model.module.mean.data.add_(1.0)


def test_copies_hold_their_own() -> None:
    model = ORTModule(Holding(*FOLLOWED["a list"]), options=Options(engine="aten"))
    model(batches()[0]).sum().backward()
    copied = copy.deepcopy(model)
    assert copied.module.weights[0] is copied.module.layer.weight
    with torch.no_grad():
        copied.module.layer.weight.zero_()
        assert bool(model.module.layer.weight.any())
        torch.testing.assert_close(copied.eval()(batches()[0]), copied.module(batches()[0]))

"""Buffers that a forward assigns, in every way that Python has for it, at any depth of a module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from tests.breadth import crossed
from tests.module.agreement import SAME

# Without the certificate, which would put eager in the place of a graph that misses a write.
BARE = Options(engine="onnxruntime", certificate="off")


def _assigned(m: Any, v: Tensor) -> None:
    m.mean = m.mean * 0.9 + v * 0.1


def _registered(m: Any, v: Tensor) -> None:
    m.register_buffer("mean", m.mean * 0.9 + v * 0.1)


def _in_the_registry(m: Any, v: Tensor) -> None:
    m._buffers["mean"] = m.mean * 0.9 + v * 0.1


def _anew(m: Any, v: Tensor) -> None:
    m.mean = nn.Buffer(m.mean * 0.9 + v * 0.1)


def _data(m: Any, v: Tensor) -> None:
    m.mean.data = m.mean.data * 0.9 + v * 0.1


def _data_in_place(m: Any, v: Tensor) -> None:
    m.mean.data.mul_(0.9).add_(v, alpha=0.1)


def _in_place(m: Any, v: Tensor) -> None:
    m.mean.lerp_(v, 0.1)


def _without_gradients(m: Any, v: Tensor) -> None:
    with torch.no_grad():
        m.mean = m.mean + v


def _twice(m: Any, v: Tensor) -> None:
    m.mean = m.mean + v
    m.mean = m.mean * 0.5


def _in_place_and_assigned(m: Any, v: Tensor) -> None:
    m.mean.add_(v)
    m.mean = m.mean * 0.5


def _assigned_and_in_place(m: Any, v: Tensor) -> None:
    m.mean = m.mean + v
    m.mean.mul_(0.5)


def _shifted(m: Any, v: Tensor) -> None:
    m.last = m.mean
    m.mean = v


def _shifted_back(m: Any, v: Tensor) -> None:
    m.mean, m.last = m.last, v


def _exchanged(m: Any, v: Tensor) -> None:
    m.mean, m.last = m.last + v, m.mean


def _of_two(m: Any, v: Tensor) -> None:
    m.mean = m.last = v * 2


def _by_the_way(m: Any, v: Tensor) -> None:
    if m.mean.sum() > 1:
        m.mean = m.mean - v
    else:
        m.mean = m.mean + v.abs()


def _as_it_is(m: Any, v: Tensor) -> None:
    m.mean = m.mean.clone()


def _in_evaluation(m: Any, v: Tensor) -> None:
    if not m.training:
        m.mean = v


WAYS: dict[str, Callable[[Any, Tensor], None]] = {
    f.__name__.strip("_").replace("_", " "): f
    for f in (
        _assigned, _registered, _in_the_registry, _anew, _data, _data_in_place, _in_place,
        _without_gradients, _twice, _in_place_and_assigned, _assigned_and_in_place, _shifted,
        _shifted_back, _exchanged, _of_two, _by_the_way, _as_it_is, _in_evaluation,
    )
}  # fmt: skip


class Keeps(nn.Module):
    """Keeps something of its input, and adds what it has kept to it."""

    def __init__(self, way: str, before: bool, detach: bool = True) -> None:
        super().__init__()
        self.way, self.before, self.detach = way, before, detach
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("last", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        mean, last = self.mean, self.last
        WAYS[self.way](self, (x.detach() if self.detach else x).mean(0))
        if self.before:  # what the names stood for
            return x + mean - 2 * last
        return x + self.mean - 2 * self.last


class Around(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.layer, self.parts = nn.Linear(4, 4), nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        for part in self.parts:
            x = part(x).tanh()
        return x


def in_a_child(part: nn.Module) -> nn.Module:
    return Around(part)


def in_two_children(part: nn.Module) -> nn.Module:
    return Around(part, nn.Sequential(copy.deepcopy(part)))


def in_one_called_twice(part: nn.Module) -> nn.Module:
    return Around(part, part)


def assert_alike(eager: nn.Module, steps: int = 3, options: Options = BARE) -> ORTModule:
    model = ORTModule(copy.deepcopy(eager), options=options)
    for number in range(steps):
        x = torch.randn(3 + number % 2, 4)
        found = []
        for run in (model, eager):
            run.zero_grad()
            given = x.clone().requires_grad_()
            output = run(given)
            output.square().sum().backward()
            found.append([output, given.grad, *run.buffers(), *(p.grad for p in run.parameters())])
        for ours, its in zip(*found, strict=True):
            torch.testing.assert_close(ours, its, rtol=SAME, atol=SAME)
    return model


@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
@pytest.mark.parametrize(
    ("place", "way", "before"),
    crossed(
        [None, in_a_child, in_two_children, in_one_called_twice], WAYS, [False, True], one_in=4
    ),
)
def test_buffers_are_what_eager_makes_of_them(
    place: Callable[[nn.Module], nn.Module] | None, way: str, before: bool
) -> None:
    part = Keeps(way, before)
    model = assert_alike(place(part) if place else part)
    if way in ("assigned", "registered", "in place", "twice", "shifted"):
        assert model.report.mode == "graph"


def test_what_autograd_follows_has_the_history_of_the_step_before() -> None:
    eager = Around(Keeps("assigned", before=False, detach=False))
    model = assert_alike(eager, steps=1)
    for each in (model, eager):
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            each(torch.ones(3, 4)).sum().backward()
    assert model.report.graph_calls == 2


@pytest.mark.usefixtures("graph_wins")
def test_a_graph_that_takes_over_has_the_buffers_of_the_steps_in_pytorch() -> None:
    eager = Around(Keeps("without gradients", before=False))
    model = assert_alike(eager, steps=130, options=Options(certificate="off"))
    assert model.report.graph_calls
    assert model.report.eager_calls


class Twice(nn.Module):
    """Has one normalization under two names, and calls it under both."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.net = nn.Sequential(nn.Linear(4, 4), self.norm, nn.ReLU())
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        parts = {"one": [self.net], "both": [self.net, self.norm], "other": [self.norm]}
        for part in parts[self.way]:
            x = part(x)
        return x


@pytest.mark.parametrize("way", ["one", "both", "other"])
def test_buffers_under_two_names_are_one(way: str) -> None:
    model = assert_alike(Twice(way))
    assert model.report.mode == "graph"

"""A part that leaves a tensor with a history behind, for a loss outside to read, is PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import Options, ORTModule
from ortrain.errors import StateError
from tests.module.alike import ENGINES, assert_alike, history

LOSSES: dict[str, torch.Tensor] = {}


@dataclass
class Given:
    hidden: torch.Tensor
    aux: torch.Tensor | None = None


class Part(nn.Module):
    """Sets a loss of its own somewhere, as layers of experts do."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.layer, self.place, self.count = nn.Linear(4, 4), place, 0
        self.listed: list[torch.Tensor] = []
        self.named: dict[str, torch.Tensor] = {}
        self.other = [nn.Module()]
        LOSSES.clear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.layer(x)
        PLACES[self.place][0](self, x, h)
        return h


def listed(part: Any, _: torch.Tensor, h: torch.Tensor) -> None:
    part.listed[:] = [h.square().mean()]


def named(part: Any, _: torch.Tensor, h: torch.Tensor) -> None:
    part.named["aux"] = h.square().mean()


def in_the_file(_: Any, __: torch.Tensor, h: torch.Tensor) -> None:
    LOSSES["aux"] = h.square().mean()


def at_the_third(part: Any, _: torch.Tensor, h: torch.Tensor) -> None:
    part.count += 1
    if part.count > 2:
        part.aux = h.square().mean()


Leaves = Callable[[Any, torch.Tensor, torch.Tensor], object]
PLACES: dict[str, tuple[Leaves, Callable[[Any], Any]]] = {
    "attribute": (lambda p, _, h: setattr(p, "aux", h.square().mean()), lambda p: p.aux),
    "list": (listed, lambda p: p.listed[0]),
    "dictionary": (named, lambda p: p.named["aux"]),
    "file": (in_the_file, lambda _: LOSSES["aux"]),
    "another module": (
        lambda p, _, h: setattr(p.other[0], "aux", h.square().mean()),
        lambda p: p.other[0].aux,
    ),
    "view": (lambda p, _, h: setattr(p, "aux", h[0]), lambda p: p.aux),
    "output": (lambda p, _, h: setattr(p, "aux", h), lambda p: p.aux),
    "input": (lambda p, x, _: setattr(p, "aux", x), lambda p: p.aux),
    "of a weight": (
        lambda p, *_: setattr(p, "aux", p.layer.weight.norm()),
        lambda p: p.aux,
    ),
    "detached": (lambda p, _, h: setattr(p, "aux", h.detach() * 1), lambda p: p.aux),
    "later": (at_the_third, lambda p: getattr(p, "aux", torch.zeros(()))),
}


class Whole(nn.Module):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(4, 4), Part(place), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.part(self.first(x).tanh()))
        return y


@pytest.mark.parametrize("engine", [*ENGINES, "kept by name"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.usefixtures("graph_wins")
def test_a_loss_reads_what_a_part_has_left(place: str, engine: str) -> None:
    def step(model: nn.Module, number: int) -> Any:
        output = model(torch.arange(8.0).reshape(2, 4) / (number + 1))
        aux = PLACES[place][1](model.part)
        (output.square().sum() + 3 * aux.square().sum()).backward()
        return output, aux

    options = ENGINES.get(engine) or replace(ENGINES["aten"], keep_in_torch=("part",))
    expected, _ = history(lambda: Whole(place), step, 5)
    found, model = history(lambda: Whole(place), step, 5, options)
    assert_alike(found, expected)
    if (
        engine == "kept by name" and place == "detached"
    ):  # what has no history stands in nobody's way
        assert model.report.graph_calls


class Hides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.layer(x)
        globals()["_".join(["hidden", "aux"])] = h.square().mean()
        return h


def test_a_loss_that_reads_what_nobody_could_see_is_an_error() -> None:
    whole = Whole("detached")
    whole.part = Hides()  # type: ignore[assignment]
    model = ORTModule(whole, options=Options(engine="aten", keep_in_torch=("part",)))
    output = model(torch.ones(2, 4))
    assert model.report.graph_calls
    with pytest.raises(StateError, match="part has left a tensor behind that a loss reads"):
        (globals().pop("hidden_aux") + 0 * output.sum()).backward()


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, given: Given) -> torch.Tensor:
        h: torch.Tensor = self.layer(given.hidden)
        given.aux = h.square().mean()
        return h


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.usefixtures("graph_wins")
def test_a_loss_reads_what_is_set_on_an_argument(engine: str) -> None:
    given = Given(torch.ones(2, 4))

    def step(model: nn.Module, number: int) -> Any:
        given.hidden = torch.arange(8.0).reshape(2, 4) / (number + 1)
        output = model(given)
        assert given.aux is not None
        (output.square().sum() + 3 * given.aux).backward()
        return output, given.aux

    expected, _ = history(Writes, step, 6)
    given.aux = None
    assert_alike(history(Writes, step, 6, ENGINES[engine])[0], expected)

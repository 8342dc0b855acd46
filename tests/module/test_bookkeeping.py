"""Scripts keep books on the module: what no code reads makes no new state, what any reads does."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import ORTModule
from tests.module.agreement import GRAPH


class Card:
    """Notes on a model, as sentence-transformers keeps them."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []
        self.best: float | None = None


class Booked(nn.Module):
    """Has books that its code does not look at."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.losses: list[float] = []
        self.notes: dict[str, Any] = {}
        self.card = Card()
        self.last: Any = None
        self.factor = 2.0
        self.names = ["factor"]

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        result: Tensor = self.layer(x) * self.read()
        return result * self.losses[-1] if twice else result

    def read(self) -> float:
        """What the forward multiplies with."""
        return self.factor


def _note(module: Booked, step: int) -> None:
    module.card.logs.append({"loss": step / 7})
    module.card.best = step / 7


BOOKS: dict[str, Callable[[Any, int], object]] = {
    "a list grows": lambda m, i: m.losses.append(i / 3),
    "a dict grows": lambda m, i: m.notes.update({f"step {i}": i}),
    "a dict is replaced": lambda m, i: setattr(m, "notes", {"step": i}),
    "an object changes": _note,
    "a number": lambda m, i: setattr(m, "last", i / 3),
    "a count": lambda m, i: setattr(m, "last", i),
    "a string": lambda m, i: setattr(m, "last", str(i)),
    "a tensor": lambda m, i: setattr(m, "last", torch.full((2,), float(i))),
    "an object is replaced": lambda m, i: setattr(m, "last", SimpleNamespace(step=i)),
    "new attributes": lambda m, i: setattr(m, f"epoch_{i // 6}", i),
    "of a module inside": lambda m, i: setattr(m.layer[0], "seen", [i]),
    "several": lambda m, i: (m.losses.append(i), _note(m, i), setattr(m, "last", str(i))),
}


@pytest.mark.parametrize("kind", BOOKS)
def test_books_that_no_code_reads_are_no_state(kind: str) -> None:
    torch.manual_seed(0)
    module = Booked()
    eager, model = copy.deepcopy(module), ORTModule(module, options=GRAPH)
    for step in range(12):
        x = torch.randn(3 + step % 2, 4)
        output = model(x)
        torch.testing.assert_close(output, eager(x))
        output.sum().backward()
        BOOKS[kind](module, step)
    assert model.report.captures <= (3 if kind == "new attributes" else 2)
    assert model.report.graph_calls == 12


class _Plain(Booked):
    def read(self) -> float:
        return self.losses[-1] if self.losses else 1.0


class _Made(Booked):
    def read(self) -> float:
        return getattr(self, "los" + "ses")[-1] if hasattr(self, "losses") and self.losses else 1.0


class _Whole(Booked):
    def read(self) -> float:
        return float(sum(vars(self)["losses"][-1:]) + 1)


class _InDict(Booked):
    def read(self) -> float:
        return float(sum(self.__dict__["losses"][-1:]) + 1)


class _Got(Booked):
    def read(self) -> float:
        return float(sum(operator.attrgetter("losses")(self)[-1:]) + 1)


class _Property(Booked):
    @property
    def level(self) -> float:
        """The last of the losses."""
        return float(sum(self.losses[-1:]) + 1)

    def read(self) -> float:
        return self.level


class _Own(Booked):
    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__({"hidden": "losses"}.get(name, name))

    def read(self) -> float:
        return float(sum(self.hidden[-1:]) + 1)  # type: ignore[operator]


class _Past(Booked):
    def read(self) -> float:
        return float(sum(object.__getattribute__(self, "losses")[-1:]) + 1)


READERS = (_Plain, _Made, _Whole, _InDict, _Got, _Property, _Own, _Past)


@pytest.mark.parametrize("kind", READERS, ids=lambda kind: kind.__name__)
def test_books_that_the_code_reads_are_read_afresh(kind: type[Booked]) -> None:
    torch.manual_seed(0)
    module = kind()
    eager, model = copy.deepcopy(module), ORTModule(module, options=GRAPH)
    for step in range(5):
        x = torch.randn(3, 4)
        torch.testing.assert_close(model(x), eager(x))
        if step in (1, 3):  # when nothing has changed for a while as well
            for each in (module, eager):
                each.losses.append(step / 2)


def test_what_another_form_of_call_reads_is_watched_from_then_on() -> None:
    torch.manual_seed(0)
    module = Booked()
    eager, model = copy.deepcopy(module), ORTModule(module, options=GRAPH)
    x = torch.randn(3, 4)
    for step in range(6):
        for each in (module, eager):
            each.losses.append(step / 2)
        for twice in (False, step > 2):
            torch.testing.assert_close(model(x, twice=twice), eager(x, twice=twice))


def test_a_switch_is_back_with_its_own_capture() -> None:
    torch.manual_seed(0)
    module = Booked()
    eager, model = copy.deepcopy(module), ORTModule(module, options=GRAPH)
    x = torch.randn(3, 4)
    for step, factor in enumerate((2.0, 2.0, 3.0, 2.0, 3.0)):
        module.factor = eager.factor = factor
        module.losses.append(step)
        torch.testing.assert_close(model(x), eager(x))

"""Containers, numbers and objects of a script's own classes, which answer Python as they like."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from tests.breadth import crossed

pytestmark = pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")


def _raises(self: Any, *_: Any) -> Any:
    raise NotImplementedError


def _nothing(self: Any, *_: Any) -> Any:
    return iter(())


def _zero(self: Any) -> int:
    return 0


def _elements(self: Any, other: Any) -> Any:
    return torch.tensor([True, False])


# What a class of e3nn, of a configuration or of a proxy may make of Python's questions.
METHODS: dict[str, tuple[str, Callable[..., Any]]] = {
    "no length": ("__len__", _raises),
    "another length": ("__len__", _zero),
    "no loop": ("__iter__", _raises),
    "an empty loop": ("__iter__", _nothing),
    "no truth": ("__bool__", _raises),
    "no equality": ("__eq__", _raises),
    "an equality of elements": ("__eq__", _elements),
    "no hash": ("__hash__", _raises),
    "no text": ("__repr__", _raises),
    "no keys": ("keys", _raises),
    "no values": ("values", _raises),
    "no items": ("items", _raises),
    "empty items": ("items", _nothing),
    "no attributes": ("__getattr__", _raises),
}
BASES: dict[type, Any] = {
    tuple: (2.0, 3.0),
    list: [2.0, 3.0],
    deque: [2.0, 3.0],
    dict: {0: 2.0},
    OrderedDict: {0: 2.0},
    int: 2,
    str: "ab",
    object: None,
}


def own(base: type, method: str, value: Any) -> Any:
    """A value of a class with the method."""
    name, function = METHODS[method]
    body: dict[str, Any] = {name: function}
    if name == "__eq__":
        body["__hash__"] = base.__hash__
    kind: Any = type("Own", (base,), body)
    return kind() if base is object else kind(value)


def first(base: type, held: Any) -> Any:
    """What a forward reads of it, past what the class makes of Python's questions."""
    if base in (tuple, list, deque, dict, OrderedDict):
        kind: Any = base
        return kind.__getitem__(held, 0)
    if base is int:
        return int.__mul__(held, 1)
    return 3.0 if base is str and str.__getitem__(held, 0) == "a" else 2.0


def changed(base: type, value: Any) -> Any:
    """A value in which a forward reads something else."""
    if base in (dict, OrderedDict):
        return {0: 5.0}
    return {int: 7, str: "ba", object: None}.get(base, [5.0, 3.0])


CASES = crossed(BASES, METHODS, one_in=4)


class Reading(nn.Module):
    def __init__(self, base: type, held: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.base = nn.Linear(3, 3), base
        self.held, self.nested = held, {"in": [held]}

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * first(self.base, self.held) + first(self.base, self.nested["in"][0])


@pytest.mark.parametrize(("base", "method"), CASES)
def test_what_a_module_holds_is_read_and_watched(base: type, method: str) -> None:
    held = own(base, method, BASES[base])
    model = ORTModule(Reading(base, held), options=Options(engine="aten"))
    x = torch.ones(2, 3)
    for value in (held, own(base, method, changed(base, BASES[base])), held):
        model.module.held = value
        torch.testing.assert_close(model(x), model.module(x))
        model(x).sum().backward()
    if base in (list, deque, dict, OrderedDict):
        kind: Any = base
        kind.__setitem__(held, 0, 9.0)
        torch.testing.assert_close(model(x), model.module(x))
        kind.__setitem__(held, 0, 2.0)
        torch.testing.assert_close(model(x), model.module(x))


class Given(nn.Module):
    def __init__(self, base: type) -> None:
        super().__init__()
        self.layer, self.base = nn.Linear(3, 3), base

    def forward(self, x: Tensor, held: Any) -> Tensor:
        return self.layer(x) * first(self.base, held)


@pytest.mark.parametrize(("base", "method"), CASES)
def test_what_a_call_is_given_is_read_or_left_to_pytorch(base: type, method: str) -> None:
    model = ORTModule(Given(base), options=Options(engine="aten"))
    x = torch.ones(2, 3)
    for value in (BASES[base], changed(base, BASES[base]), BASES[base]):
        held = own(base, method, value)
        torch.testing.assert_close(model(x, held), model.module(x, held))

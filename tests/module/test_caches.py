"""What a module's code keeps of its results holds numbers, and none of a trace's fake tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrize
from torch.utils.weak import WeakTensorKeyDictionary

from tests.module.alike import ENGINES, assert_alike, history

MEMO: dict[int, torch.Tensor] = {}
WEAK = WeakTensorKeyDictionary()


@functools.lru_cache
def remembered(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32).cos()


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


class Parametrized(nn.Module):
    def __init__(self, inside: bool = False) -> None:
        super().__init__()
        self.layer, self.inside = nn.Linear(3, 3), inside
        parametrize.register_parametrization(self.layer, "weight", Doubled())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached() if self.inside else nullcontext():
            return self.layer(self.layer(x))

    def kept(self) -> list[Any]:
        return [*parametrize._cache.values()]


class Memos(nn.Module):
    """Results in an attribute, a dictionary of its own, of its class and of the file, …"""

    of_class: ClassVar[dict[int, torch.Tensor]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.own, self.size = nn.Linear(3, 3), dict[int, torch.Tensor](), 0
        for memo in (MEMO, WEAK, self.of_class, kept_by_function.__dict__):
            memo.clear()

    @functools.cached_property
    def table(self) -> torch.Tensor:
        return torch.arange(3.0).cos()

    def rotary(self, size: int) -> torch.Tensor:
        if size > self.size:
            self.size, self.cos = size, torch.arange(float(size)).cos()
        return self.cos[:size, None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, weight = self.layer(x) * self.table * self.rotary(x.shape[0]), self.layer.weight
        for memo in (self.own, self.of_class, MEMO):
            if 3 not in memo:
                memo[3] = torch.arange(3.0).cos()
            y = y + memo[3]
        if weight not in WEAK:
            WEAK[weight] = torch.arange(3.0).sin()
        return y * WEAK[weight] * kept_by_function()

    def kept(self) -> list[Any]:
        found = [self.own, self.of_class, MEMO, [*WEAK.values()], vars(kept_by_function)]
        return [*found, self.__dict__.get("table"), self.__dict__.get("cos")]


def kept_by_function() -> Any:
    if not hasattr(kept_by_function, "table"):
        kept_by_function.table = torch.arange(3.0).sin()  # type: ignore[attr-defined]
    return kept_by_function.table  # type: ignore[attr-defined]


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        remembered.cache_clear()
        type(self).method.cache_clear()

    @functools.lru_cache  # noqa: B019
    def method(self, size: int) -> torch.Tensor:
        return torch.arange(size, dtype=torch.float32).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.method(3) * remembered(x.shape[0])[:, None]

    def kept(self) -> list[Any]:
        return [remembered(2), self.method(3)]


MODULES: dict[str, Callable[[], nn.Module]] = {
    "parametrized": Parametrized,
    "parametrized inside": functools.partial(Parametrized, inside=True),
    "memos": Memos,
    "lru_cache": Remembers,
}


@pytest.mark.parametrize("engine", ["default", "aten"])
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.usefixtures("graph_wins")
def test_no_fake_tensor_stays_in_a_cache(name: str, cached: bool, engine: str) -> None:
    def step(model: nn.Module, number: int) -> Any:
        with parametrize.cached() if cached else nullcontext():
            first = model(torch.ones(2 + number % 2, 3) + number)
            second = model(torch.ones(2, 3))
            (first.sum() + second.square().sum()).backward()
            # Autograd's graph of these is gone with the backward.
            return first, second, [*parametrize._cache.values()]

    def left(module: Any) -> list[Any]:
        return module.kept()

    expected, _ = history(MODULES[name], step, 7, left=left)
    found, model = history(MODULES[name], step, 7, ENGINES[engine], left)
    assert_alike(found, expected)
    if name.startswith("parametrized"):
        assert model.report.graph_calls


class Hidden(nn.Module):
    """Keeps its results under a name that nobody can know before."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memo = globals().setdefault("_".join(["hidden", "memo"]), {})
        if 3 not in memo:
            memo[3] = torch.arange(3.0)
        return x * self.w * memo[3]


def test_no_fake_tensor_stays_under_a_name_that_nobody_knows() -> None:
    def step(model: nn.Module, number: int) -> Any:
        output = model(torch.ones(2, 3) + number)
        output.square().sum().backward()
        return output

    def left(_: nn.Module) -> list[Any]:
        return [globals()["hidden_memo"]]

    found = []
    for options in (None, ENGINES["aten"]):
        found.append(history(Hidden, step, 3, options, left)[0])
        del globals()["hidden_memo"]
    assert_alike(*found)


def test_a_module_of_fake_tensors_returns_them() -> None:
    def step(model: nn.Module, _: int) -> bool:
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            return isinstance(model(torch.ones(2, 3)), FakeTensor)

    assert [given for given, *_ in history(Parametrized, step, 2, ENGINES["aten"])[0]] == [True] * 2

"""What autograd has saved is written to by the user's code alone, and by nobody who looks at it."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.module.alike import ENGINES, assert_alike, history

N, ELSEWHERE = torch.zeros(()), {"n": torch.zeros(())}


@dataclasses.dataclass
class Counts:
    n: torch.Tensor


class Slotted:
    __slots__ = ("n",)


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = torch.zeros(())


class Places(nn.Module):
    """A count in each of the places where a module's code may keep a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.own = nn.Parameter(torch.ones(2)), torch.zeros(())
        self.register_buffer("buffer", torch.zeros(()))
        self.frozen = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.entry, self.item = {"n": torch.zeros(())}, ([torch.zeros(())],)
        self.counts, self.slotted, self.others = Counts(torch.zeros(())), Slotted(), [Holds()]
        self.slotted.n = torch.zeros(())
        self.base, self.view = torch.zeros(3), torch.zeros(2, 3)[1]
        self.row = self.base[1:].view(2)
        self.array = np.zeros(1, np.float32)
        self.of_array = torch.from_numpy(self.array)
        for each in (N, ELSEWHERE["n"]):
            each.zero_()

    def places(self) -> list[torch.Tensor]:
        return [
            self.own, self.buffer, self.frozen, self.entry["n"], self.item[0][0], self.counts.n,
            self.slotted.n, self.others[0].n, N, ELSEWHERE["n"], self.base[0], self.row[1],
            self.view[2], self.of_array[0],
        ]  # fmt: skip

    def forward(self, x: torch.Tensor, counts: bool = True) -> torch.Tensor:
        y = x * self.w
        for place in self.places() if counts else ():
            place.add_(1)
        for place in self.places():
            y = y + x * self.w / place
        return y


class Around(nn.Module):
    """A buffer that the backward reads, of a sub-module that is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.w = nn.BatchNorm1d(2).eval(), nn.Parameter(torch.ones(2))
        self.norm.running_var.fill_(3.0)

    def forward(self, x: torch.Tensor, counts: bool = True) -> torch.Tensor:
        y = self.norm(x * self.w)
        return y * self.norm.running_var if counts else y


def once(model: nn.Module, number: int) -> Any:
    loss = model(torch.tensor([[1.0 + number, 0.5], [0.1, 2.0]])).sum()
    loss.backward()
    return loss


def evaluated_between(model: nn.Module, number: int) -> Any:
    output = model(torch.tensor([[1.0 + number, 0.5], [0.1, 2.0]])).sum()
    with torch.no_grad():
        other = model(torch.ones(3, 2), counts=False)
    output.backward()
    return output, other


def thrice(model: nn.Module, number: int) -> Any:
    first = model(torch.tensor([[1.0 + number, 0.5], [0.1, 2.0]])).sum()
    second = model(torch.ones(5, 2), counts=False).sum()
    third = model(torch.ones(4, 2), counts=False).sum()
    (second + third).backward()
    first.backward()
    return first, second, third


@pytest.mark.parametrize(
    ("script", "engine"),
    [(once, "default"), (evaluated_between, "default"), (thrice, "default"), (thrice, "aten")],
)
def test_a_count_that_autograd_has_saved_is_as_in_pytorch(script: Any, engine: str) -> None:
    def left(module: Any) -> list[Any]:
        return [*module.places(), torch.from_numpy(module.array)]

    expected, _ = history(Places, script, 3, left=left)
    assert "RuntimeError" not in str(expected)
    found, _ = history(Places, script, 3, options=ENGINES[engine], left=left)
    assert_alike(found, expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_buffer_is_as_in_pytorch_while_its_readers_are_compared(engine: str) -> None:
    expected, _ = history(Around, thrice)
    assert "RuntimeError" not in str(expected)
    options = replace(ENGINES[engine], keep_in_torch=("norm",))
    found, _ = history(Around, thrice, options=options)
    assert_alike(found, expected)

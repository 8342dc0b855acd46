"""Code that asks whether it is traced does at every call what it does where it is not."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_exporting

from ortrain import Options, ORTModule


class Part(nn.Module):
    """What may count, note and draw."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.last, self.log = 0, torch.zeros(4), list[int]()
        self.register_buffer("sum", torch.zeros(4))
        self.sum: Tensor


class Counts(Part):
    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            self.count += 1
        return x * 2


class CountsUnlessCompiled(Part):
    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return x * 2
        self.count += 1
        return x * 2


class AsksByAnotherName(Part):
    def forward(self, x: Tensor) -> Tensor:
        if not is_exporting():
            self.last = x.detach().mean(0)
        return x * 2


class Appends(Part):
    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            self.log.append(len(self.log))
        return x * 2


class AsksForTheKindOfTensor(Part):
    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, FakeTensor):
            self.count += 1
        return x * 2


class Careful(Part):
    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and x.isnan().any():
            raise ValueError("no number")
        self.sum += x.detach().sum(0)
        return x * 2


PARTS = (Counts, CountsUnlessCompiled, AsksByAnotherName, Appends, AsksForTheKindOfTensor)


@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
@pytest.mark.parametrize("engine", ["onnxruntime", "aten"])
@pytest.mark.parametrize("kind", PARTS)
def test_what_it_leaves_in_the_module_is_left_there_by_every_call(
    kind: type[Part], engine: Any
) -> None:
    parts = nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 4))
    eager: Any = copy.deepcopy(parts)
    model: Any = ORTModule(parts, options=Options(engine=engine))
    for _ in range(3):
        x = torch.randn(3, 4)
        torch.testing.assert_close(model(x), eager(x))
        mine, own = parts[1], eager[1]
        assert (mine.count, mine.log) == (own.count, own.log), model.report
        torch.testing.assert_close(mine.last, own.last)
    # What asks by its name stays PyTorch's alone; what else tells the two apart does so as a whole.
    kept = [call.site.name for call in model.report.kept]
    asked = kind is not AsksForTheKindOfTensor
    assert (model.report.mode, kept) == (("graph", ["1"]) if asked else ("eager", [])), model.report


def test_a_question_that_changes_nothing_is_no_obstacle() -> None:
    parts = nn.Sequential(nn.Linear(4, 4), Careful())
    eager: Any = copy.deepcopy(parts)
    model: Any = ORTModule(parts, options=Options(engine="aten", fallback="raise"))
    for _ in range(3):
        x = torch.randn(3, 4)
        torch.testing.assert_close(model(x), eager(x))
        torch.testing.assert_close(parts[1].sum, eager[1].sum)
    assert (model.report.graph_calls, model.report.kept) == (3, ())


@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
@pytest.mark.parametrize("draw", [np.random.rand, random.random], ids=["numpy", "Python"])
def test_what_it_draws_where_it_is_not_traced_is_drawn(draw: Callable[[], float]) -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if torch.compiler.is_exporting() else x + draw() * 1e-9

    def seeded() -> None:
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)

    model = ORTModule(nn.Sequential(nn.Linear(4, 4), Noisy()), options=Options(engine="aten"))
    seeded()
    for _ in range(3):
        model(torch.randn(3, 4))
    after = draw()
    seeded()
    drawn = [draw() for _ in range(4)]
    assert after == drawn[3]

"""Code that asks whether it is traced does at every call what it does where it is not."""

from __future__ import annotations

import contextlib
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
from torch.utils.checkpoint import checkpoint

from ortrain import Options, ORTModule
from ortrain.frontend import proof


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


# Not those who ask whether they are compiled: Dynamo says that they are, as torch.compile does.
PARTS = (Counts, AsksByAnotherName, Appends, AsksForTheKindOfTensor)


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
    assert model.report.graph_calls == 3, model.report


def product(x: Tensor) -> Tensor:
    return (x.detach().requires_grad_() * 2).exp().sum()


def inner_gradient(x: Tensor) -> None:
    leaf = x.detach().requires_grad_()
    torch.autograd.grad((leaf * 2).exp().sum(), leaf)


def unless_it_fails(x: Tensor) -> None:
    with contextlib.suppress(RuntimeError):
        inner_gradient(x)
        return
    raise AssertionError("it failed")


BACKWARDS: dict[str, Callable[[Tensor], object]] = {
    "backward": lambda x: product(x).backward(),
    "grad": inner_gradient,
    "in a try": unless_it_fails,
    "torch.func": torch.func.grad(lambda x: x.exp().sum()),
    "vjp": lambda x: torch.func.vjp(torch.exp, x.detach())[1](x.detach()),
    "checkpoint": lambda x: checkpoint(product, x, use_reentrant=False).backward(),
    "none": product,
}


class CountsBackwards(Part):
    def __init__(self, backward: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.backward = backward

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            self.backward(x)
            self.count += 1
        return x * 2


class CountsFullMasks(Part):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and mask.all():
            self.count += 1
        return x * mask[..., None] * 2


class CountsLargeBatches(Part):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and len(x) > 4:
            self.count += 1
        if len(x) > 4:
            x = x + 1
        return x * mask[..., None] * 2


@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
@pytest.mark.parametrize("engine", ["onnxruntime", "aten"])
@pytest.mark.parametrize("padded", ["the first row", "the last row", "none"])
@pytest.mark.parametrize("kind", [CountsFullMasks, CountsLargeBatches])
def test_what_values_or_sizes_decide_is_left_there_by_every_call(
    kind: type[Part], padded: str, engine: Any
) -> None:
    mask = torch.ones(6, 5, dtype=torch.int64)
    if padded != "none":
        mask[0 if padded == "the first row" else -1, 3:] = 0
    part = kind()
    eager = copy.deepcopy(part)
    model = ORTModule(part, options=Options(engine=engine))
    for _ in range(3):
        x = torch.randn(6, 5, 4, requires_grad=True)
        torch.testing.assert_close(model(x, mask), eager(x, mask))
        assert part.count == eager.count, model.report
    assert model.report.graph_calls == 3, model.report


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


class LeavesOut(nn.Module):
    """What a mask does is left out where it hides nothing, as transformers leaves it out."""

    def __init__(self, otherwise: float) -> None:
        super().__init__()
        self.layer, self.otherwise = nn.Linear(4, 4), otherwise

    def forward(self, x: Tensor, mask: Tensor, items: Tensor) -> Tensor:
        hidden: Tensor = self.layer(x) / items
        if not is_exporting() and mask.all():
            return hidden * self.otherwise
        return hidden * mask[..., None]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
@pytest.mark.parametrize("first", ["padded", "full", "one"])
@pytest.mark.parametrize("otherwise", [1.0, 2.0])
@pytest.mark.parametrize("large", [False, True])
def test_masks_of_each_kind_give_eagers_numbers_and_their_graphs_are_compared_once(
    monkeypatch: pytest.MonkeyPatch, otherwise: float, first: str, dtype: Any, large: bool
) -> None:
    """Of a large batch the first rows are."""
    if large:
        monkeypatch.setattr("ortrain.frontend.proof.ENOUGH", 0)
    compared: list[Any] = []
    own = proof.proven
    monkeypatch.setattr(proof, "proven", lambda *a: compared.append(a) or own(*a))
    full = torch.ones(3, 5, dtype=dtype)
    padded = full.clone()
    padded[2, 3:] = 0
    masks = {"padded": padded, "full": full, "one": full[:1, :1]}
    eager = LeavesOut(otherwise)
    model = ORTModule(copy.deepcopy(eager), options=Options(engine="aten"))
    order, seen = [first, *masks, *masks], 0
    for turn, name in enumerate(order):
        seen = len(compared) if turn == 1 + len(masks) else seen
        x = torch.randn(*masks[name].shape, 4)
        wanted, found = (each(x, masks[name], torch.tensor(3.0)) for each in (eager, model))
        torch.testing.assert_close(found, wanted)
        for module, output in ((eager, wanted), (model, found)):
            module.zero_grad()
            output.sin().sum().backward()
        torch.testing.assert_close(model.module.layer.weight.grad, eager.layer.weight.grad)
    assert model.report.graph_calls == len(order), model.report
    assert len(compared) == seen  # nothing is compared again

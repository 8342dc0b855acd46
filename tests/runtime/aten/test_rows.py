"""The gradient of a table in memory that stays is that of fresh memory, whatever users do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from ortrain.runtime.aten import lowering, rows
from ortrain.runtime.aten.rows import Table
from ortrain.runtime.aten.tables import add_rows

COUNT, WIDTH = 50, 8

# From where a gradient is reached: most bump no version of what was handed out.
WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "the gradient": lambda gradient: gradient,
    "its data": lambda gradient: gradient.data,
    "detached": lambda gradient: gradient.detach(),
    "NumPy": lambda gradient: torch.from_numpy(gradient.numpy()),
    "DLPack": lambda gradient: torch.utils.dlpack.from_dlpack(gradient.detach()),
    "its storage": lambda gradient: torch.empty(0).set_(gradient.untyped_storage()).view(COUNT, -1),
    "rows of it": lambda gradient: gradient.data[: COUNT // 2],
    "a column of it": lambda gradient: gradient.data[:, 1],
    "its bytes": lambda gradient: gradient.data.view(torch.int32),
}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "scaled": lambda some: some.mul_(2),
    "weight decay": lambda some: some.add_(torch.ones_like(some), alpha=3),
    "filled": lambda some: some.fill_(7),
    "two places": lambda some: some.view(-1)[::3].sub_(1) if some.is_contiguous() else some.sub_(1),
    "foreach": lambda some: torch._foreach_add_([some], 1),
    "out": lambda some: torch.add(some, 1, out=some),
    "NumPy": lambda some: np.copyto(some.numpy(), 5),
}


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "LARGE", 0)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, COUNT, (3, 4), generator=generator)
    return torch.randn(3, 4, WIDTH, generator=generator), indices


def expected(dy: Tensor, indices: Tensor, padding: int) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(dy, indices, COUNT, padding, False)


@pytest.mark.parametrize("padding", [-1, 7])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("way", WAYS)
def test_what_a_user_has_written_is_gone_with_the_next_step(
    way: str, write: str, padding: int
) -> None:
    table = Table()
    for seed in range(4):
        dy, indices = batch(seed)
        gradient = table.gradient(dy, indices, COUNT, padding)
        torch.testing.assert_close(gradient, expected(dy, indices, padding))
        WRITES[write](WAYS[way](gradient))
        del gradient


def test_what_is_not_a_number_is_gone_as_well() -> None:
    table = Table()
    table.gradient(*batch(0), COUNT, -1).data.fill_(float("nan"))
    torch.testing.assert_close(table.gradient(*batch(1), COUNT, -1), expected(*batch(1), -1))


@pytest.mark.parametrize("way", WAYS)
def test_what_a_user_holds_is_not_written_into(way: str) -> None:
    table, held = Table(), []
    for seed in range(4):
        some = WAYS[way](table.gradient(*batch(seed), COUNT, -1))
        held.append((some, some.clone()))
        assert all(torch.equal(now, before) for now, before in held)


def test_a_storage_that_a_user_holds_is_not_written_into() -> None:
    table = Table()
    storage = table.gradient(*batch(0), COUNT, -1).untyped_storage()
    before = storage.tolist()
    table.gradient(*batch(1), COUNT, -1)
    assert storage.tolist() == before


def test_memory_stays_where_nobody_holds_it() -> None:
    table = Table()
    pointers = {table.gradient(*batch(seed), COUNT, -1).data_ptr() for seed in range(4)}
    assert len(pointers) == 1


def test_other_sizes_and_dtypes_have_memory_of_their_own() -> None:
    table = Table()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        dy, indices = batch(0)
        gradient = table.gradient(dy.to(dtype), indices, COUNT, -1)
        assert gradient.dtype is dtype
        torch.testing.assert_close(gradient, expected(dy.to(dtype), indices, -1))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(COUNT, WIDTH)
        self.tags = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.tags(self.words(ids)).square().mean()
        return result


def classic_step(model: nn.Module) -> None:
    """SGD as it was written before torch 1.5: the decay is added to the gradient's data."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        change = parameter.grad.data
        change.add_(parameter.data, alpha=0.1)
        parameter.data.add_(change, alpha=-0.1)


@pytest.mark.parametrize("to_none", [True, False])
def test_an_optimizer_that_writes_into_the_data_of_gradients_trains_as_in_eager(
    to_none: bool,
) -> None:
    torch.manual_seed(0)
    eager = Tagger()
    wrapped = ORTModule(copy.deepcopy(eager), options=Options(engine="aten"))
    for seed in range(5):
        ids = batch(seed)[1]
        for model in (eager, wrapped):
            model(ids).backward()
            classic_step(model)
            model.zero_grad(set_to_none=to_none)
    torch.testing.assert_close(
        dict(wrapped.module.named_parameters()), dict(eager.named_parameters())
    )


class Tied(nn.Module):
    """A table whose rows are read, once or twice, and that is a head, too."""

    def __init__(self, padding: int | None, reads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Embedding(COUNT, WIDTH, padding_idx=padding, dtype=dtype)
        self.head = nn.Linear(WIDTH, COUNT, bias=False, dtype=dtype)
        self.head.weight, self.reads = self.table.weight, reads

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        for _ in range(self.reads - 1):
            h = h + self.table(ids.flip(0)).tanh()
        return self.head(torch.tanh(h)).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reads", [1, 2])
@pytest.mark.parametrize("padding", [None, 0, 7])
def test_rows_are_added_to_what_else_a_table_receives(
    padding: int | None, reads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    monkeypatch.setattr(lowering, "add_rows", lambda program: counts.append(add_rows(program)))
    module = Tied(padding, reads, dtype)
    model = ORTModule(copy.deepcopy(module), options=Options(engine="aten"))
    ids = torch.randint(0, 9, (4, 5))
    for _ in range(2):
        for each in (module, model):
            each.zero_grad()
            each(ids).backward()
        tolerance = {torch.bfloat16: 0.05, torch.float32: 1e-5}.get(dtype, 1e-10)
        found, exact = (next(each.parameters()).grad for each in (model, module))
        assert found is not None
        torch.testing.assert_close(found, exact, rtol=tolerance, atol=tolerance * 0.1)
    assert max(counts) == (0 if dtype is torch.bfloat16 else reads)

"""The gradient of a table in memory that stays is that of fresh memory, whatever users do."""

from __future__ import annotations

import pytest
import torch

from ortrain.runtime.aten import rows
from ortrain.runtime.aten.rows import Table

COUNT, WIDTH = 50, 8


@pytest.fixture(autouse=True)
def large(monkeypatch):
    monkeypatch.setattr(rows, "LARGE", 0)


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, COUNT, (3, 4), generator=generator)
    return torch.randn(3, 4, WIDTH, generator=generator), indices


def expected(dy, indices, padding):
    return torch.ops.aten.embedding_dense_backward(dy, indices, COUNT, padding, False)


@pytest.mark.parametrize("padding", [-1, 7])
@pytest.mark.parametrize(
    "use",
    ["let go", "held", "scaled", "written", "added into", "not a number"],
)
def test_each_step_gives_its_own_gradient(use, padding):
    table, held = Table(), []
    for seed in range(6):
        dy, indices = batch(seed)
        gradient = table.gradient(dy, indices, COUNT, padding)
        torch.testing.assert_close(gradient, expected(dy, indices, padding))
        for before, its in held:
            torch.testing.assert_close(before, its)
        if use == "held":
            held.append((gradient, expected(dy, indices, padding)))
        elif use == "scaled":
            gradient.mul_(0.5)
        elif use == "written":
            gradient[3] = 1.0
        elif use == "added into":
            gradient += 1.0
        elif use == "not a number":
            gradient.fill_(float("nan"))
        del gradient


def test_a_view_that_a_user_keeps_is_not_written_into():
    table = Table()
    dy, indices = batch(0)
    row = table.gradient(dy, indices, COUNT, -1)[indices[0, 0]]
    before = row.clone()
    table.gradient(*batch(1), COUNT, -1)
    assert torch.equal(row, before)


def test_memory_stays_where_nobody_holds_it():
    table = Table()
    pointers = {table.gradient(*batch(seed), COUNT, -1).data_ptr() for seed in range(4)}
    assert len(pointers) == 1


def test_indices_that_the_user_changes_afterwards_are_no_matter():
    table = Table()
    dy, indices = batch(0)
    table.gradient(dy, indices, COUNT, -1)
    indices.zero_()
    dy, indices = batch(1)
    torch.testing.assert_close(table.gradient(dy, indices, COUNT, -1), expected(dy, indices, -1))


def test_other_sizes_and_dtypes_have_memory_of_their_own():
    table = Table()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        dy, indices = batch(0)
        gradient = table.gradient(dy.to(dtype), indices, COUNT, -1)
        assert gradient.dtype is dtype
        torch.testing.assert_close(gradient, expected(dy.to(dtype), indices, -1))

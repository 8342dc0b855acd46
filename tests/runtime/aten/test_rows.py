"""Rows are added to what else a table receives."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from ortrain.runtime.aten import lowering
from ortrain.runtime.aten.tables import add_rows

COUNT, WIDTH = 50, 8


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

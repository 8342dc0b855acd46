"""Gradients of tables: rows are added to what else one receives, and users may write to them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from ortrain.runtime.aten import lowering
from ortrain.runtime.aten.tables import add_rows

COUNT, WIDTH = 50, 8


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
        ids = torch.randint(0, COUNT, (3, 4), generator=torch.Generator().manual_seed(seed))
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

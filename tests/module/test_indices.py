"""An index that PyTorch calls out of range is an error of a graph, and never another element."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ortrain import Options, ORTModule

SIZE = 5
Operator = Callable[[Tensor, Tensor], Tensor]  # of a weight [SIZE, 4] and indices [3]


def _wide(i: Tensor) -> Tensor:
    return i[:, None].expand(3, 4)


OPERATORS: dict[str, Operator] = {
    "gather": lambda w, i: w.gather(0, _wide(i)),
    "gather along the last axis": lambda w, i: w.t().gather(1, i[None]),
    "take_along_dim": lambda w, i: torch.take_along_dim(w, i[:, None], 0),
    "index_select": lambda w, i: w.index_select(0, i),
    "index_select along the last axis": lambda w, i: w.t().index_select(1, i),
    "index_select of long rows": lambda w, i: w.repeat(1, 8).index_select(0, i),
    "scatter": lambda w, i: w.scatter(0, _wide(i), 2 * w[:3]),
    "scatter of a number": lambda w, i: w.scatter(0, _wide(i), 2.0),
    "scatter_add": lambda w, i: w.scatter_add(0, _wide(i), w[:3]),
    "scatter_reduce": lambda w, i: w.scatter_reduce(0, _wide(i), w[:3], "sum"),
    "mean of scatter_reduce": lambda w, i: w.scatter_reduce(
        0, _wide(i), w[:3], "mean", include_self=False
    ),
    "index_add": lambda w, i: w.index_add(0, i, w[:3], alpha=2),
    "index_add along the last axis": lambda w, i: w.t().index_add(1, i, w.t()[:, :3]),
    "index_add in place": lambda w, i: torch.zeros(SIZE, 4).index_add_(0, i, w[:3]),
    "index_copy": lambda w, i: w.index_copy(0, i, 2 * w[:3]),
    "index_fill": lambda w, i: w.index_fill(0, i, 2.0),
    "embedding": lambda w, i: F.embedding(i, w),
    "embedding_bag": lambda w, i: F.embedding_bag(i[None], w),
    "take": lambda w, i: w.t().take(i),
    "index": lambda w, i: w[i],
    "index along the last axis": lambda w, i: w.t()[:, i],
    "two indices": lambda w, i: w[i, torch.tensor([0, 1, 2])],
    "index_put": lambda w, i: w.index_put((i,), 2 * w[:3]),
    "adding index_put": lambda w, i: w.index_put((i,), w[:3], accumulate=True),
    "adding index_put by rows": lambda w, i: w.index_put(
        (i, torch.tensor([0, 1, 2])), w[:3, 0], accumulate=True
    ),
    "adding index_put by columns": lambda w, i: w.t().index_put(
        (torch.tensor([0, 1, 2]), i), w[:3, 0], accumulate=True
    ),
    "nll_loss": lambda w, i: F.nll_loss(w.t()[:3], i, torch.arange(5.0)),
    "cross_entropy": lambda w, i: F.cross_entropy(w.t()[:3], i),
    "cross_entropy of weights": lambda w, i: F.cross_entropy(
        w.t()[:3], i, torch.arange(5.0), label_smoothing=0.1
    ),
    "multi_margin_loss": lambda w, i: F.multi_margin_loss(w.t()[:3], i),
    "multilabel_margin_loss": lambda w, i: F.multilabel_margin_loss(
        w[:, 0], F.pad(i, (0, 2), value=-1)
    ),
    "one_hot": lambda w, i: F.one_hot(i, SIZE).float() @ w,
    "max_unpool": lambda w, i: F.max_unpool1d(
        w.t()[:, :3], i.expand(4, 3), 2, output_size=(SIZE,)
    ),
    "bincount": lambda w, i: torch.bincount(i, minlength=SIZE)[:SIZE].float() @ w,
}  # fmt: skip
WITH_INT32 = {
    "index_select", "index_add", "embedding", "two indices", "index_put",
    "adding index_put by columns",
}  # fmt: skip


class Indexing(nn.Module):
    def __init__(self, operator: Operator) -> None:
        super().__init__()
        self.weight, self.operator = nn.Parameter(torch.linspace(-1, 1, 20).view(SIZE, 4)), operator

    def forward(self, i: Tensor) -> Tensor:
        return self.operator(self.weight, i)


def _trained(module: nn.Module, i: Tensor) -> tuple[Tensor, Tensor | None] | None:
    """The result and the gradient; None where there is an error."""
    (weight,) = module.parameters()
    weight.grad = None
    try:
        y = module(i)
        (y * torch.arange(1.0, y.numel() + 1).view(y.shape)).sum().backward()
    except (IndexError, RuntimeError):
        return None
    return y.detach(), weight.grad


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.int64) for name in OPERATORS] + [(n, torch.int32) for n in sorted(WITH_INT32)],
)
def test_a_graph_refuses_the_indices_that_pytorch_refuses(
    name: str, dtype: torch.dtype, engine: str
) -> None:
    eager = Indexing(OPERATORS[name])
    options = Options(engine=engine, fallback="raise")  # type: ignore[arg-type]
    model = ORTModule(Indexing(OPERATORS[name]), options=options)
    extremes = (2**62 + 1, -(2**63)) if dtype is torch.int64 else (2**31 - 1, -(2**31))
    if name == "bincount":
        extremes = ()  # as many counts as that
    for index in (2, -1, -SIZE, -SIZE - 1, -100, SIZE, SIZE + 5, *extremes, 3):
        given = torch.tensor([0, index, 1], dtype=dtype)
        wanted, got = _trained(eager, given), _trained(model, given)
        assert (got is None) == (wanted is None), index
        if got is not None and wanted is not None:
            torch.testing.assert_close(got, wanted)
    assert model.report.graph_calls >= 2

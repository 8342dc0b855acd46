"""A sample of the sweep in each run of the tests; the whole is `make sweep`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ortrain.config import Engine
from tests.breadth import crossed
from tests.sweep import results
from tests.sweep.agreement import difference, step
from tests.sweep.page import page
from tests.sweep.rows import Row, Sample, all_rows
from tests.sweep.verdict import ENGINES, Outcome, of_row

DOCS = Path(__file__).parents[2] / "docs"
BAD = (Outcome.WRONG, Outcome.RAISES, Outcome.OWN_ERROR)
# Of each family a row or two: elementwise, reductions, views, indices, joins, products, layers.
SAMPLE = [
    "operator pow", "operator where", "operator clamp", "operator masked_fill",
    "operator sum", "operator amax", "operator logsumexp", "operator std", "operator prod",
    "operator reshape", "operator expand", "operator diagonal", "operator roll",
    "operator gather", "operator index_put", "operator scatter_reduce.mean", "operator nonzero",
    "operator cat", "operator tile", "operator einsum", "operator linalg.norm",
    "operator complex", "operator nn.functional.layer_norm", "module nn.LazyConv1d",
]  # fmt: skip


@pytest.mark.parametrize(("engine", "key"), crossed(ENGINES, SAMPLE, one_in=2))
def test_a_row_is_what_the_kept_results_say(engine: Engine, key: str) -> None:
    verdict = of_row(all_rows()[key], engine=engine)
    assert verdict.outcome not in BAD, verdict.reason
    assert verdict == results.load(engine)[key]


@pytest.mark.parametrize(
    ("key", "dtype"), crossed(SAMPLE[::3], [torch.bfloat16, torch.float16], one_in=2), ids=str
)
def test_a_row_agrees_in_16_bits(key: str, dtype: torch.dtype) -> None:
    verdict = of_row(all_rows()[key], dtype=dtype, engine="aten")
    assert verdict.outcome not in BAD, verdict.reason


class _Scaled(nn.Module):
    def __init__(self, factor: float, barrier: bool = False) -> None:
        super().__init__()
        self.factor, self.barrier = factor, barrier

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * self.factor + (y * 0 if self.barrier else y.detach())


def test_a_wrong_number_is_told() -> None:
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    right, wrong = (step(_Scaled(factor), (x, y), {}) for factor in (2.0, 2.001))
    assert "from float64" in difference(wrong, right, right)


def test_a_gradient_of_zero_is_told_from_none() -> None:
    x, y = torch.ones(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    none, zero = (step(_Scaled(2.0, barrier), (x, y), {}) for barrier in (False, True))
    assert difference(zero, none, none).endswith("a torch.float32 instead of None")


class _Raising(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("never")


def test_what_eager_refuses_is_not_compared() -> None:
    row = Row("module", "raising", lambda: iter([Sample(_Raising, (torch.ones(2),), {})]))
    assert of_row(row).outcome is Outcome.NOT_COMPARABLE


def test_the_page_is_that_of_the_kept_results() -> None:
    assert (DOCS / "coverage.md").read_text() == page()
    for engine in ENGINES:
        assert {v.outcome for v in results.load(engine).values()}.isdisjoint(BAD)

"""Products of batches: whatever the operands' layouts, the numbers are those of PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ortrain.runtime.aten import batches

# How an operand [2, 3, M, N] of each layout lies in memory.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x.contiguous(),
    "heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "columns": lambda x: x.mT.contiguous().mT,
    "columns of heads": lambda x: x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
    "strided": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "strided columns": lambda x: x.mT.repeat_interleave(2, -1)[..., ::2].mT,
    "one for all": lambda x: x[:1, :1],
    "expanded": lambda x: x[:, :1].expand(2, 3, -1, -1),
}
PAIRS = [*itertools.product(LAYOUTS, LAYOUTS)]


def operands(left: str, right: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    a, b = torch.randn(2, 3, 5, 4).to(dtype), torch.randn(2, 3, 4, 7).to(dtype)
    return LAYOUTS[left](a), LAYOUTS[right](b)


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_a_product_is_that_of_pytorch(left: str, right: str) -> None:
    a, b = operands(left, right)
    torch.testing.assert_close(batches.matmul(a, b), a @ b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_a_wide_product_is_not_rounded(left: str, right: str, dtype: torch.dtype) -> None:
    a, b = operands(left, right, dtype)
    exact = a.float() @ b.float()
    torch.testing.assert_close(batches.wide_matmul(a, b), exact)
    torch.testing.assert_close(batches.wide_matmul(a.float(), b), exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_a_scaled_product_is_rounded_once(left: str, right: str, dtype: torch.dtype) -> None:
    a, b = operands(left, right, dtype)
    exact = 0.3 * (a.double() @ b.double())
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(
        batches.scaled_matmul(a, b, 0.3).double(), exact, rtol=0.51 * step, atol=1e-5
    )


def test_columns_of_heads_are_read_as_they_lie() -> None:
    """Of keys [B, S, H, E] the scores read [B, H, E, S]: no copy turns them."""
    keys = torch.randn(2, 7, 3, 4).permute(0, 2, 3, 1)
    assert batches._laid_out(keys).stride() == (84, 28, 1, 4)
    rows = torch.randn(2, 7, 3, 4).transpose(1, 2)
    assert batches._laid_out(rows) is rows

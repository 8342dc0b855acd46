"""Attention of float16 and bfloat16: its factor is exact, and no product is too large for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ortrain import Options, ORTModule

NARROW = [torch.bfloat16, torch.float16]
KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "plain": lambda length: {},
    "causal": lambda length: {"is_causal": True},
    "masked": lambda length: {"attn_mask": (torch.arange(length) < length // 2)[None]},
    "added": lambda length: {"attn_mask": torch.linspace(-4, 0, length)[None, None, None]},
    "scaled": lambda length: {"scale": 0.2},
}


class Attending(nn.Module):
    """Attention whose query has a parameter."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.settings = settings

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        given: dict[str, Any] = {
            name: v.to(query.dtype) if isinstance(v, Tensor) and v.is_floating_point() else v
            for name, v in self.settings.items()
        }
        return scaled_dot_product_attention(query * self.weight, key, value, **given)


def run(module: Any, tensors: list[Tensor], dy: Tensor) -> list[Tensor]:
    """The output and the gradients of query, key and value."""
    given = [t.clone().requires_grad_() for t in tensors]
    output = module(*given)
    output.backward(dy.to(output.dtype))
    return [output.detach(), *(t.grad for t in given if t.grad is not None)]


def distance(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


def spelled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention in PyTorch's operators, each of which rounds once."""
    return (query * query.shape[-1] ** -0.5 @ key.mT).softmax(-1) @ value


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("width", [24, 32, 64, 96])
def test_it_is_as_exact_as_operators_of_pytorch(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = [2 * torch.randn(2, 3, 40, width).to(dtype) for _ in range(3)]
    dy = torch.randn(2, 3, 40, width).to(dtype)
    exact = run(spelled, [t.double() for t in tensors], dy)
    eager = distance(run(spelled, tensors, dy), exact)
    model = ORTModule(Attending({}).to(dtype), options=Options(engine="aten", fallback="raise"))
    for mine, its in zip(distance(run(model, tensors, dy), exact), eager, strict=True):
        assert mine < 1.05 * its


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("kind", KINDS)
def test_products_too_large_for_the_dtype_are_none_of_its_numbers(
    kind: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    key = torch.randn(1, 2, 8, 64).sign().to(dtype) * 60
    tensors = [key.flip(2).clone(), key, torch.randn(1, 2, 8, 64).to(dtype)]
    dy = torch.ones_like(key)
    module = Attending(KINDS[kind](8)).to(dtype)
    model = ORTModule(module, options=Options(engine="aten", fallback="raise"))
    for mine, its in zip(run(model, tensors, dy), run(module, tensors, dy), strict=True):
        torch.testing.assert_close(mine, its, rtol=2e-2, atol=2e-2)

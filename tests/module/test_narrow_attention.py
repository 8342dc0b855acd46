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


class Biased(nn.Module):
    """Attention with a bias for each head and pair of places, as of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(-1, 1, 4 * 24 * 24).view(4, 24, 24))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, self.bias[None])


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


ROWS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "plain": lambda q, k, v: (q, k, v),
    "alike": lambda q, k, v: (q / 10, k / 10, v / 10),
    "steep": lambda q, k, v: (4 * q, k, v),
    "off-center": lambda q, k, v: (q, k + 5, v + 10),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ROWS)
def test_it_is_as_exact_as_the_kernels_of_pytorch(rows: str, kind: str) -> None:
    """Its scores and weights are not rounded; gradients of weights are, which kernels have not."""
    torch.manual_seed(0)
    drawn = ROWS[rows](*(torch.randn(2, 4, 64, 64) for _ in range(3)))
    tensors = [t.bfloat16() for t in drawn]
    dy = torch.randn(2, 4, 64, 64).bfloat16()
    module = Attending(KINDS[kind](64))
    exact = run(module.double(), [t.double() for t in tensors], dy)
    eager = distance(run(module.bfloat16(), tensors, dy), exact)
    model = ORTModule(module, options=Options(engine="aten", fallback="raise"))
    output, *gradients = distance(run(model, tensors, dy), exact)
    assert output < 1.02 * eager[0]
    for mine, its in zip(gradients, eager[1:], strict=True):
        assert mine < 1.5 * its


def test_a_learned_bias_has_the_gradient_of_pytorch() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(2, 4, 24, 32).bfloat16() for _ in range(3)]
    dy = torch.randn(2, 4, 24, 32).bfloat16()
    found = []
    for dtype, wrap in [(torch.float64, False), (torch.bfloat16, False), (torch.bfloat16, True)]:
        module = Biased().to(dtype)
        options = Options(engine="aten", fallback="raise")
        model = ORTModule(module, options=options) if wrap else module
        run(model, [t.to(dtype) for t in tensors], dy)
        assert module.bias.grad is not None
        found.append(module.bias.grad)
    exact, its, mine = found
    assert distance([mine], [exact])[0] < 1.5 * distance([its], [exact])[0]


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

"""Operators whose tensors differ in dtype: what autocast casts, what they cast, what promotes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn

from ortrain import Options, ORTModule
from ortrain.frontend.export import export
from tests.breadth import crossed


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32])
def test_what_attention_casts_for_itself_is_no_cast_of_autocast(
    dropout: float, mask: torch.dtype | None
) -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
            q = self.project(x).view(2, 5, 4, 4).transpose(1, 2)
            given = None if mask is None else seen
            return nn.functional.scaled_dot_product_attention(q, q, q, given, dropout)

    seen = torch.ones(2, 1, 5, 5).to(mask or torch.bool)
    with torch.autocast("cpu", torch.bfloat16):
        program = export(Attending().train(), (torch.randn(2, 5, 16), seen)).program
    (attention,) = (node for node in program.graph if node.op_type == "Attention")
    assert {v.dtype for v in attention.inputs[:3]} == {ir.DataType.BFLOAT16}


class Mixed(nn.Module):
    """Three projections, of which some leave what autocast has made of them, some are float32."""

    def __init__(self, wide: tuple[bool, ...], combine: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.wide, self.combine = wide, combine

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        made = [layer(x) for layer in self.layers]
        made = [y * x.sigmoid() if wide else y for y, wide in zip(made, self.wide, strict=True)]
        return self.combine(*(y.view(4, 16, 4, 4).transpose(1, 2) for y in made), seen)


def _attended(**settings: Any) -> Callable[..., torch.Tensor]:
    def attend(q: Any, k: Any, v: Any, seen: Any) -> torch.Tensor:
        if settings.get("enable_gqa"):
            k, v = k[:, :2], v[:, :2]
        if settings.get("is_causal"):
            seen = None
        return nn.functional.scaled_dot_product_attention(q, k, v, seen, **settings)

    return attend


COMBINED: dict[str, Callable[..., torch.Tensor]] = {
    "attention": _attended(),
    "attention with dropout": _attended(dropout_p=0.2),
    "attention of groups": _attended(enable_gqa=True),
    "attention of groups with dropout": _attended(enable_gqa=True, dropout_p=0.2),
    "causal attention": _attended(is_causal=True, dropout_p=0.2),
    "einsum": lambda q, k, v, seen: torch.einsum(
        "bhij,bhjd->bhid",
        torch.einsum("bhid,bhjd->bhij", q, k).masked_fill(~seen, -1e4).softmax(-1),
        v,
    ),
    "products": lambda q, k, v, seen: (q @ k.mT * seen) @ v,
    "parts of one": lambda q, k, v, seen: torch.cat([q, k, torch.stack([v, k]).sum(0)], -1),
}


WIDE = [(False, False, True), (True, True, False), (False, True, True)]


@pytest.mark.parametrize(("name", "wide"), crossed(COMBINED, WIDE, one_in=3), ids=str)
def test_what_takes_mixed_dtypes_under_autocast_alone_is_a_graph(
    name: str, wide: tuple[bool, ...]
) -> None:
    """The certificate compares outputs and gradients with PyTorch's, with the same draws."""
    seen = torch.ones(4, 1, 16, 16, dtype=torch.bool).tril()
    torch.manual_seed(0)
    module = Mixed(wide, COMBINED[name])
    model = ORTModule(module, options=Options(engine="aten", fallback="raise"))
    with torch.autocast("cpu", torch.bfloat16):
        output = model(torch.randn(4, 16, 16), seen)
        assert output.dtype == module(torch.randn(4, 16, 16), seen).dtype
    output.float().square().sum().backward()
    assert model.report.certificate


MIXED: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "einsum of no sum": lambda a, b: torch.einsum("ij,ij->ij", a, b),
    "einsum of an outer product": lambda a, b: torch.einsum("i,j->ij", a[0], b[0]),
    "einsum over one": lambda a, b: torch.einsum("ik,kj->ij", a[:, :1], b[:1]),
    "cross entropy of probabilities": lambda a, b: nn.functional.cross_entropy(a, b.softmax(-1)),
    "cross entropy of classes with weights": lambda a, b: nn.functional.cross_entropy(
        a, b.softmax(-1), b[0].abs(), label_smoothing=0.1
    ),
    "addr": lambda a, b: torch.addr(a, b[:, 0], b[:, 1]),
    "logaddexp2": torch.logaddexp2,
    "addcdiv": lambda a, b: torch.addcdiv(a, b, b.abs() + 1),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "cat": lambda a, b: torch.cat([a, b]),
    "in place": lambda a, b: (a * 1).mul_(b).copy_(b * 2),
    "a distance": nn.functional.pairwise_distance,
}
PAIRS = [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32),
         (torch.float16, torch.bfloat16)]  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_mixed_dtypes_promote_as_in_pytorch(name: str) -> None:
    class Pair(nn.Module):
        def __init__(self, first: torch.dtype, second: torch.dtype) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(4, 4).to(first))
            self.b = nn.Parameter(torch.randn(4, 4).to(second))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return MIXED[name](self.a * x.to(self.a.dtype), self.b)

    compared = 0
    for first, second in PAIRS:
        torch.manual_seed(0)
        module = Pair(first, second)
        try:
            expected = module(torch.ones(4, 4))
            expected.float().sum().backward()
        except RuntimeError:
            continue  # which PyTorch refuses
        module.zero_grad()
        model = ORTModule(module, options=Options(engine="aten", fallback="raise"))
        found = model(torch.ones(4, 4))
        found.float().sum().backward()
        assert found.dtype == expected.dtype
        assert model.report.certificate
        compared += 1
    assert compared

"""Attention under autocast: what it casts by itself is no cast of autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn

from ortrain import Options, ORTModule
from ortrain.capture.export import capture


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
        program = capture(Attending().train(), (torch.randn(2, 5, 16), seen)).program
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


@pytest.mark.parametrize("name", COMBINED)
def test_what_takes_mixed_dtypes_under_autocast_alone_is_a_graph(name: str) -> None:
    """The certificate compares outputs and gradients with PyTorch's, with the same draws."""
    seen = torch.ones(4, 1, 16, 16, dtype=torch.bool).tril()
    for wide in ((False, False, True), (True, True, False), (False, True, True)):
        torch.manual_seed(0)
        module = Mixed(wide, COMBINED[name])
        model = ORTModule(module, options=Options(engine="aten", fallback="raise"))
        with torch.autocast("cpu", torch.bfloat16):
            output = model(torch.randn(4, 16, 16), seen)
            assert output.dtype == module(torch.randn(4, 16, 16), seen).dtype
        output.float().square().sum().backward()
        assert model.report.certificate, wide

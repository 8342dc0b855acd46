"""Attention under autocast: what it casts by itself is no cast of autocast."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
from torch import nn

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

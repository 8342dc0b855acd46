"""A captured graph knows which of its operators a checkpoint holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint

from ortrain.capture.export import capture
from ortrain.errors import CaptureError
from ortrain.program import region_of


class TwoOfThree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.layers[0], x, use_reentrant=False)
        x = self.layers[1](x).tanh()
        y: torch.Tensor = checkpoint(self.layers[2], x, use_reentrant=False)
        return y


def test_operators_are_marked_with_the_checkpoint_that_they_are_in() -> None:
    program = capture(TwoOfThree(), (torch.randn(3, 4),)).program
    regions = [region_of(n) for n in program.graph if n.op_type in ("MatMul", "Gemm", "Tanh")]
    assert regions == ["1", "", "", "2"]


def test_torch_is_as_before_after_a_capture_and_after_one_that_failed() -> None:
    own = dict(vars(torch_checkpoint))
    capture(TwoOfThree(), (torch.randn(3, 4),))
    assert vars(torch_checkpoint) == own

    class Fails(nn.Module):
        def fail(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = checkpoint(self.fail, x, use_reentrant=False)
            return y

    with pytest.raises(CaptureError):
        capture(Fails(), (torch.randn(3, 4),))
    assert vars(torch_checkpoint) == own

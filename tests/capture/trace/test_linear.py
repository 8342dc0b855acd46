"""DeepSpeed's ``torch.nn.functional.linear`` is PyTorch's own while a module is traced."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule


class FrugalLinear(torch.autograd.Function):
    """As DeepSpeed's: saves what it was given, with a ``setup_context`` of its own."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.addmm(bias, x, weight.t())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return upstream[0] @ weight, upstream[0].t() @ x, upstream[0].sum(0)


def frugal(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return FrugalLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call, no-any-return]


@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
@pytest.mark.parametrize("owner", ["deepspeed.runtime.zero.linear", "somebodys"])
def test_deepspeeds_linear_is_pytorchs(owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = types.FunctionType(frugal.__code__, globals(), "frugal")
    found.__module__ = owner
    monkeypatch.setattr(nn.functional, "linear", found)
    model = ORTModule(nn.Linear(4, 3), options=Options(engine="onnxruntime"))
    x = torch.randn(2, 4)
    torch.testing.assert_close(model(x), model.module(x))
    assert model.report.mode == ("graph" if owner.startswith("deepspeed") else "eager")
    assert nn.functional.linear is found

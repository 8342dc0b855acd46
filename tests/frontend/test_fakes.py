"""Calls of tensors that have sizes and no numbers, and traces: PyTorch runs them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode

import ortrain
from ortrain import Options, ORTModule


class Model(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layer, self.rate = nn.Linear(4, 4), rate

    def forward(self, x: Tensor, others: list[Tensor] | None = None) -> Tensor:
        for other in others or []:
            x = x + other
        x = torch.tanh(self.layer(x))
        return nn.functional.dropout(x, self.rate) + torch.rand(4) * self.rate


@pytest.mark.parametrize("engine", ["aten", "onnxruntime", "auto"])
@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("before", [0, 2])
def test_a_call_with_fakes_runs_in_pytorch(
    engine: Any, rate: float, nested: bool, before: int
) -> None:
    model = ORTModule(Model(rate), options=Options(engine=engine))
    x = torch.ones(2, 4)
    for _ in range(before):
        model(x, [x])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(x)
        output = model(x if nested else fake, [fake if nested else x])
        assert isinstance(output, FakeTensor)
        assert output.shape == (2, 4)
    found = model(x, [x])
    assert type(found) is Tensor
    found.sum().backward()
    if engine != "auto":
        assert model.report.mode == "graph"


def test_a_model_that_is_compiled_in_place_has_a_call_with_fakes() -> None:
    model = ortrain.compile(Model(0.5))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert isinstance(model(mode.from_tensor(torch.ones(2, 4))), FakeTensor)
    assert type(model(torch.ones(2, 4))) is Tensor


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("engine", ["aten", "onnxruntime", "auto"])
def test_torch_jit_traces_the_module_whatever_runs_its_calls(engine: Any) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model = ORTModule(module, options=Options(engine=engine))
    for _ in range(2):
        model(torch.ones(2, 4))
    traced = torch.jit.trace(model, (torch.ones(2, 4),))
    x = torch.randn(3, 4)
    torch.testing.assert_close(traced(x), module(x))
    assert model(x).shape == (3, 4)
    if engine != "auto":
        assert model.report.mode == "graph"

"""Parameters that a graph has been made of are converted, loaded and replaced as in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.module.alike import ENGINES, assert_alike, history


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.second.weight.requires_grad_(False)
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).sin()) * self.scale


def larger(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor * 2 for name, tensor in model.state_dict().items()}


def replaced(model: Any) -> None:
    model.first.weight = nn.Parameter(model.first.weight.detach() * 2)


def other_data(model: Any) -> None:
    model.first.weight.data = model.first.weight.data * 2


CONVERSIONS: dict[str, Callable[[Any], object]] = {
    "to": lambda m: m.to(torch.float64),
    "double": lambda m: m.double(),
    "type": lambda m: m.type(torch.float64),
    "to the same": lambda m: m.to("cpu", torch.float32),
    "apply": lambda m: m._apply(lambda t: t * 2),
    "load": lambda m: m.load_state_dict(larger(m)),
    "load and assign": lambda m: m.load_state_dict(larger(m), assign=True),
    "replace": replaced,
    "other data": other_data,
}


@pytest.mark.parametrize("engine", [*ENGINES, "kept"])
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_a_conversion_behind_a_graph_is_trained_on(conversion: str, engine: str) -> None:
    def step(model: nn.Module, number: int) -> Any:
        if number == 2:
            CONVERSIONS[conversion](model)
        dtype = next(model.parameters()).dtype
        output = model(torch.arange(6.0, dtype=dtype).reshape(2, 3) / (number + 1))
        output.square().sum().backward()
        return output

    options = ENGINES.get(engine) or replace(ENGINES["aten"], keep_in_torch=("second",))
    expected, _ = history(Small, step, 4)
    assert "RuntimeError" not in str(expected)
    found, model = history(Small, step, 4, options)
    assert_alike(found, expected)
    assert engine not in ENGINES or engine == "default" or model.report.graph_calls == 4

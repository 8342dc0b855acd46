"""Outputs that are an argument, a parameter, a buffer or another output are these very tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from tests.module.agreement import GRAPH, SAME


class Returns(nn.Module):
    def __init__(self, use: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.tied = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.tied.weight = self.layer.weight
        self.register_buffer("buffer", torch.ones(4))
        self.use = use

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.use(self, x, y)


def _written(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    hidden = m.layer(x) * 1
    return hidden, hidden.add_(y)


USES: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "an argument": lambda m, x, y: (m.layer(x), x),
    "the other argument": lambda m, x, y: (y, m.layer(x) + y),
    "both": lambda m, x, y: {"x": x, "h": m.layer(x) * y, "y": y},
    "a parameter": lambda m, x, y: (m.layer(x) + y, m.layer.bias),
    "a tied parameter": lambda m, x, y: (m.layer(x) + y, m.tied.weight),
    "a buffer": lambda m, x, y: (m.layer(x) * m.buffer, m.buffer),
    "a buffer that it updates": lambda m, x, y: (m.layer(x), m.buffer.add_(y.detach().mean(0))),
    "an output twice": lambda m, x, y: [m.layer(x)] * 2 + [y],
    "what is written in place": _written,
    "a loss among others": lambda m, x, y: (m.layer(x).square().mean(), x, m.layer.weight),
    "nothing new": lambda m, x, y: (x, y),
}


def tensors(output: Any) -> list[Tensor]:
    return list(output.values()) if isinstance(output, dict) else list(output)


@pytest.mark.parametrize("name", USES)
def test_what_is_returned_is_what_eager_returns(name: str) -> None:
    eager = Returns(USES[name])
    ours = copy.deepcopy(eager)
    model = ORTModule(ours, options=GRAPH)
    for number in range(3):
        found = []
        for module, run in ((ours, model), (eager, eager)):
            torch.manual_seed(number)
            given = [torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)]
            module.zero_grad()
            outputs = tensors(run(*given))
            known = [*given, *module.parameters(), *module.buffers(), *outputs]
            places = [next(i for i, t in enumerate(known) if t is each) for each in outputs]
            loss = sum((each * each.detach().cos()).sum() for each in outputs)
            assert isinstance(loss, Tensor)
            loss.backward()
            gradients = [t.grad for t in (*given, *module.parameters())]
            with torch.no_grad():
                for each in outputs:
                    each.mul_(0.5)
            values = [t.detach() for t in (*given, *module.parameters(), *module.buffers())]
            found.append((places, gradients, values))
        (mine, our_gradients, our_values), (its, its_gradients, its_values) = found
        assert mine == its
        for one, other in zip(our_gradients, its_gradients, strict=True):
            assert (one is None) is (other is None)
            torch.testing.assert_close(one, other, rtol=SAME, atol=SAME)
        for one, other in zip(our_values, its_values, strict=True):
            torch.testing.assert_close(one, other, rtol=SAME, atol=SAME)
    assert model.report.graph_calls == 3


def test_in_evaluation_too() -> None:
    model = ORTModule(Returns(USES["both"]), options=Options(engine="onnxruntime"))
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    with torch.no_grad():
        output = model(x, y)
    assert output["x"] is x
    assert output["y"] is y
    assert model.report.mode == "graph"

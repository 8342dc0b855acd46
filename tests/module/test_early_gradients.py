"""Hooks that use gradients up get those of each piece of the backward before the next one runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from ortrain.runtime.aten.executor import AtenCompiled
from ortrain.runtime.onnxruntime.executor import Compiled


class Layers(nn.Module):
    """The first layer's weight is the last one's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.layers.append(self.layers[0])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().sum()


def in_the_backward(module: nn.Module, events: list[str]) -> None:
    """Has SGD step as soon as a gradient is there, and drop it."""

    def step(parameter: Tensor) -> None:
        assert parameter.grad is not None
        events.append("step")
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(step)


ENGINES: dict[str, Any] = {"aten": AtenCompiled, "onnxruntime": Compiled}


@pytest.mark.parametrize("engine", ENGINES)
def test_an_optimizer_steps_while_the_backward_goes_on(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module = Layers()
    eager = copy.deepcopy(module)
    events: list[str] = []
    in_the_backward(eager, [])
    in_the_backward(module, events)
    options = Options(engine=engine, fallback="raise", backward_pieces=4)
    model = ORTModule(module, options=options)
    run = ENGINES[engine].run_values

    def noted(self: Any, feeds: Any) -> Any:
        events.append("piece")
        return run(self, feeds)

    for number in range(3):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(number))
        loss = model(x)
        events.clear()
        with monkeypatch.context() as patch:
            patch.setattr(ENGINES[engine], "run_values", noted)
            loss.backward()
        eager(x).backward()
        assert events.count("piece") == 4
        assert events.count("step") == len([*module.parameters()])
        assert "step" in events[: [i for i, e in enumerate(events) if e == "piece"][2]]
        for ours, theirs in zip(module.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
            assert ours.grad is None

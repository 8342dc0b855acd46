"""What may be written to between forward and backward, and what may not: as autograd says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import Options, ORTModule
from tests.module.alike import ENGINES, assert_alike, history


class Reads(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.w, self.hidden, self.last = (
            nn.Parameter(torch.ones(4)),
            nn.Linear(4, 5),
            nn.Linear(5, 4),
        )
        self.register_buffer("buffer", torch.arange(4.0))
        self.case = case

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return CASES[self.case][0](self, x, labels)


def perceptron(m: Any, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = m.last(m.hidden(x).tanh())
    return y


def entropy(m: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(x + m.w, labels)


Forward = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
# What is computed, what is written to, and whether the backward may need it.
CASES: dict[str, tuple[Forward, str, bool]] = {
    "sum": (lambda m, x, _: (x + m.w).sum(), "x", False),
    "view": (lambda m, x, _: (x.view(-1)[:4] + m.w).tanh(), "x", False),
    "concatenation": (lambda m, x, _: torch.cat([x, m.w[None]]).sum(), "x", False),
    "mask": (lambda m, x, _: ((m.w * 2) + (x > 0) * -1e4).softmax(-1)[:, 1], "x", False),
    "product": (lambda m, x, _: x * m.w, "x", True),
    "first layer": (perceptron, "x", True),
    "normed input": (lambda m, x, _: m.hidden((x - 0.5) / 0.25), "x", False),
    "times one": (lambda m, x, _: m.hidden(x * 1.0), "x", False),
    "scaled view": (lambda m, x, _: m.hidden(x.view(3, 4) * 0.5), "x", False),
    "view of all": (lambda m, x, _: m.hidden(x.t().t()), "x", True),
    "forward alone": (lambda m, x, _: m.w * 2 + x.detach().mean(), "x", False),
    "logits": (entropy, "x", False),
    "labels": (entropy, "labels", True),
    "first bias": (perceptron, "hidden.bias", False),
    "last bias": (perceptron, "last.bias", False),
    "first weight": (perceptron, "hidden.weight", False),
    "last weight": (perceptron, "last.weight", True),
    "added buffer": (lambda m, x, _: (x + m.w + m.buffer).tanh(), "buffer", False),
    "factor in a buffer": (lambda m, x, _: (x + m.w * m.buffer).tanh(), "buffer", True),
    "output": (lambda m, x, _: x + m.w, "output", False),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("graph_wins")
def test_a_write_before_the_backward_is_noticed_where_it_matters(case: str, engine: str) -> None:
    written, matters = CASES[case][1:]

    def step(model: Any, number: int) -> Any:
        x, labels = torch.arange(12.0).reshape(3, 4).sin() + number, torch.tensor([0, 1, 2])
        output = model(x, labels)
        given = output.detach().clone()
        known = {"x": x, "labels": labels, "output": output, **dict(model.named_buffers())}
        target = known[written] if written in known else model.get_parameter(written)
        before = target.detach().clone()
        with torch.no_grad():
            target.zero_()
        try:
            output.sum().backward()
        except RuntimeError:
            model.zero_grad()  # PyTorch has given some of them
            raise
        finally:
            with torch.no_grad():
                target.copy_(before)
        return given

    steps = 6 if engine == "default" else 2
    expected, _ = history(lambda: Reads(case), step, steps)
    assert (expected[0][0] == "RuntimeError") is matters
    found, model = history(lambda: Reads(case), step, steps, ENGINES[engine])
    assert_alike(found, expected)
    # Backwards that raise are not timed.
    assert model.report.graph_calls or (matters and engine == "default")


class Both(nn.Module):
    """A loss, and what it is computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x * 0.5)
        return {"loss": logits.square().mean(), "logits": logits}


@pytest.mark.parametrize("certificate", ["off", "first", "each size"])
def test_the_first_backward_of_all_may_be_of_other_outputs_than_the_loss(certificate: Any) -> None:
    """A comparison's own backwards, which are of the loss alone, tell nothing of those to come."""
    torch.manual_seed(0)
    plain = Both()
    options = Options(engine="aten", fallback="raise", certificate=certificate)
    model = ORTModule(copy.deepcopy(plain), options=options)
    for rows in (3, 5):
        for each in (plain, model):
            x = torch.arange(4.0 * rows).reshape(rows, 4).sin()
            found = each(x)
            x.zero_()
            (found["loss"] + found["logits"].sum()).backward()
    torch.testing.assert_close(model.module.layer.weight.grad, plain.layer.weight.grad)
    assert model.report.graph_calls == 2

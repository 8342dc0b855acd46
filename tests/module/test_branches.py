"""Code that branches on values: each way that a call has gone is a graph behind the branch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from ortrain.errors import CaptureError
from ortrain.ondevice import LossType, generate_artifacts
from tests.module.agreement import GRAPH, SAME

pytestmark = pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")

PROGRAMS = 20  # 300 by hand
ANY = Options(engine="onnxruntime", fallback="torch")

# Statements on a tensor ``h`` with branches; each question is about values.
QUESTIONS = (
    "h.sum() > {c}", "(h > {c}).any()", "not (h.abs() < {c} + 2).all()", "(h > {c}).any().item()",
    "bool(h[0, 0] > {c})", "h.mean() > {c} and h.amax() > {c}", "h[0].sum() > {c} or n > 4",
    "(h > {c}).sum() > 3", "(h[:1, :1] > {c})", "not bool((h.sum() < {c}).item())",
    "torch.isfinite(h).all()", "any([h.amin() > {c}, h.amax() > {c}])", "h.sum().item() > {c}",
    "(h > {c}).sum().item() == 0", "h[0].mean().item() > {c} or h.sum().item() < {c}",
)  # fmt: skip
STATEMENTS = (
    "if {q}:\n    h = h * 2\nelse:\n    h = h - 1",
    "if {q}:\n    h = h.clamp(-1, 1)",
    "h = h.abs() if {q} else h.square()",
    "h = h * (2.0 if {q} else 3.0)",
    "for _ in range(3):\n    if {q}:\n        h = h + 0.5",
    "if {q}:\n    self.seen.add_(1)",
    "h = h * max(h[0, 0], h[1, 1])",
    "h = h / max(h.abs().max().item(), 1.0)",
    "c = h.mean().item()\nh = h * c if c > 0 else h - c",
    "n = 0\nwhile (h.abs() > 1).any() and n < 4:\n    h, n = h * 0.5, n + 1",
    "if {q}:\n    return h.tanh() * self.scale",
    "if {q}:\n    if h.sum() > 1:\n        h = h.exp()\n    else:\n        h = h.sigmoid()",
)


class Branching(nn.Module):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 3), nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.zeros(()))
        self.text, made = text, {}
        exec(text, {"torch": torch}, made)  # noqa: S102  (a program that this file has drawn)
        self.body: Callable[[Any, Tensor], Tensor] = made["forward"]

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.layer(x))


def program(draw: random.Random) -> str:
    """The source of a forward with one to three branches."""
    lines = ["n = h.shape[0]"]
    for _ in range(draw.randint(1, 3)):
        question = draw.choice(QUESTIONS).format(c=round(draw.uniform(-1, 1), 2))
        lines += draw.choice(STATEMENTS).format(q=question).splitlines()
    lines.append("return h * self.scale")
    return "def forward(self, h):\n" + "".join(f"    {line}\n" for line in lines)


def step(module: nn.Module, model: nn.Module, x: Tensor) -> list[Tensor]:
    module.zero_grad()
    x = x.clone().requires_grad_()
    output = model(x)
    output.square().sum().backward()
    gradients = [x.grad, *[p.grad for p in module.parameters()]]
    return [output.detach(), *[torch.zeros(()) if g is None else g.clone() for g in gradients]]


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_programs_that_branch_on_values_agree_on_every_way(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    eager = Branching(program(draw))
    ours = copy.deepcopy(eager)
    model = ORTModule(ours, options=ANY)
    graph = 0
    for _ in range(9):
        x = torch.randn(draw.choice([4, 4, 6]), 3) * draw.choice([0.3, 1, 3])
        for mine, its in zip(step(ours, model, x), step(eager, eager, x), strict=True):
            torch.testing.assert_close(mine, its, rtol=SAME, atol=SAME * its.abs().max().item())
        assert torch.equal(ours.seen, eager.seen)
        graph += model.report.mode == "graph"
    report = model.report
    assert report.graph_calls == graph, str(report)
    assert graph + report.eager_calls == 9, str(report)
    assert report.eager_calls == report.astray or report.reason, str(report)


class Clamped(nn.Module):
    """As DETR's encoder: values that are not finite are clamped."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if not torch.isfinite(h).all():
            h = h.clamp(-10, 10).nan_to_num()
        return h.tanh()


def test_both_ways_of_a_branch_are_graphs_behind_that_of_what_is_asked() -> None:
    model = ORTModule(Clamped(), options=GRAPH)
    for value in (1.0, 2.0, float("inf"), 3.0):
        x = torch.full((2, 3), value)
        torch.testing.assert_close(model(x), model.module(x))
    assert (model.report.graph_calls, model.report.astray, model.report.captures) == (4, 0, 3)


def test_a_way_that_changes_at_every_call_costs_no_further_graphs() -> None:
    module = Branching("def forward(self, h): return h * (2 if h.sum() > 0 else 3) * self.scale")
    model = ORTModule(module, options=ANY)
    for call in range(60):
        x = (-1) ** call * torch.ones(2, 3) * 50
        torch.testing.assert_close(model(x), module(x))
    # The layer, the question, and what follows on either way.
    assert (model.report.graph_calls, model.report.captures) == (60, 4)


@torch.no_grad()
def test_ways_that_are_drawn_are_as_likely_as_in_pytorch() -> None:
    """Layer dropout: the graph before the branch draws which way a call goes."""
    module = Branching(
        "def forward(self, h):\n"
        "    if torch.rand(()) < 0.25:\n"
        "        return h * 0 + self.scale * 0\n"
        "    return h * 0 + self.scale / self.scale + 0 * torch.rand(3)"
    )
    model = ORTModule(module, options=Options(engine="onnxruntime", certificate="off"))
    torch.manual_seed(0)
    dropped = sum(model(torch.ones(2, 3)).sum().item() == 0 for _ in range(800))
    assert model.report.graph_calls == 800
    assert 150 < dropped < 250  # 200 ± 4 standard deviations


def test_a_device_has_no_pytorch_for_the_other_way(tmp_path: Any) -> None:
    with pytest.raises(CaptureError, match="Data-dependent branching"):
        generate_artifacts(
            Clamped(),
            example_inputs={"x": torch.ones(2, 3)},
            loss=LossType.MSELoss,
            artifact_directory=tmp_path,
        )


def _flagged(w: Tensor, x: Tensor, flag: Tensor) -> Tensor:
    y = w * x
    if flag:
        y = y + flag
    return y


def _flagged_by_number(w: Tensor, x: Tensor, flag: Tensor) -> Tensor:
    y = w * x
    if flag.item() > 0:
        y = y + flag
    return y


def _flagged_twice(w: Tensor, x: Tensor, flag: Tensor) -> Tensor:
    y = w * x
    if flag[0] > 0 and not (x < 0):
        y = y + flag
    return y


class Flagged(nn.Module):
    def __init__(self, body: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.w, self.body = nn.Parameter(torch.tensor([2.0])), body

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        return self.body(self.w, x, flag)


@pytest.mark.parametrize("body", [_flagged, _flagged_by_number, _flagged_twice])
@pytest.mark.parametrize("engine", ["onnxruntime", "aten"])
def test_a_branch_on_the_one_value_of_a_batch_of_one_row_is_a_check(body: Any, engine: Any) -> None:
    eager = Flagged(body)
    model = ORTModule(copy.deepcopy(eager), options=Options(engine=engine, fallback="raise"))
    for x, flag in ((3.0, 6.0), (3.0, 0.0), (5.0, 1.0), (-5.0, 1.0), (1.0, 2.0)):
        results = []
        for module in (model, eager):
            module.zero_grad()
            output = module(torch.tensor([x]), torch.tensor([flag]))
            output.sum().backward()
            results.append((output.detach(), module.w.grad))
        assert results[0] == results[1]
    assert model.report.graph_calls >= 3
    assert model.report.astray == 5 - model.report.graph_calls
    with pytest.raises(RuntimeError, match=r"more than one value|2 elements"):
        model(torch.ones(2), torch.ones(2).view(2, 1) if body is _flagged_twice else torch.ones(2))


class Labelled(nn.Module):
    """Branches on values; holds a tensor in a list, and may make a text of others."""

    def __init__(self, label: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.layer, self.seen, self.label = nn.Linear(4, 4), [torch.ones(3)], label

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        self.label(h)
        return (h * 2 if h.abs().sum().item() > 0 else h).sum()


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize(
    "label",
    [lambda h: None, lambda h: f"{h.mean()}", lambda h: f"{h.mean()} of {h.sum()}"],
    ids=["no text", "a text", "a text of two"],
)
def test_texts_of_tensors_are_no_obstacle_to_a_branch(label: Any, engine: Any) -> None:
    model = ORTModule(Labelled(label), options=Options(engine=engine, fallback="raise"))
    for rows in (2, 3):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(model(x), model.module(x))
    assert model.report.graph_calls == 2

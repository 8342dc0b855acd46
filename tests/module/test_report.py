"""The report tells apart calls with gradients and calls without, where there are both."""

from __future__ import annotations

import torch
from torch import nn

from ortrain import Options, ORTModule

# PyTorch without gradients, the graph with them.
APART = Options(engine="onnxruntime", fallback="raise", inference="torch")


def call(model: nn.Module, grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        output = model(torch.ones(3, 4))
    if grad:
        output.sum().backward()


def test_calls_without_gradients_leave_the_report_on_training_alone() -> None:
    model = ORTModule(nn.Linear(4, 2), options=APART)
    assert str(model.report) == "ORTModule: not called yet"
    for grad in (True, False):
        call(model, grad)
    assert (model.report.mode, model.report.reason) == ("graph", "")
    inference = model.report.inference
    assert inference is not None
    assert (inference.mode, inference.reason) == ("eager", 'inference="torch"')
    lines = str(model.report).splitlines()
    assert lines[:2] == ["ORTModule: graph", "  calls     1 as a graph, 0 in PyTorch"]
    assert lines[-2:] == [
        '  without gradients: eager (inference="torch")',
        "    calls     0 as a graph, 1 in PyTorch",
    ]


def test_calls_before_the_first_training_are_told_apart_from_then_on() -> None:
    options = Options(engine="torch", fallback="raise", inference="onnxruntime")
    model = ORTModule(nn.Linear(4, 2), options=options)
    call(model, grad=False)
    assert model.report.mode == "graph"
    assert model.report.inference is None
    for grad in (True, False, False):
        call(model, grad)
    assert (model.report.mode, model.report.reason) == ("eager", 'engine="torch"')
    assert model.report.eager_calls == 1
    inference = model.report.inference
    assert inference is not None
    assert (inference.mode, inference.graph_calls) == ("graph", 2)

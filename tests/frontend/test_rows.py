"""Indices that are expanded from one number a row, as graph networks have: rows move whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from ortrain.config import Engine

Operator = Callable[[Tensor, Tensor], Tensor]  # of x [N, 3, 4] and indices [E]


def _wide(x: Tensor, i: Tensor) -> Tensor:
    return i[:, None, None].expand(-1, *x.shape[1:])


def _last(x: Tensor, i: Tensor) -> Tensor:
    return i[None, None].expand(*x.shape[1:], -1)


def _none(x: Tensor) -> Tensor:
    return x.new_zeros(x.shape)


ROWS: dict[str, Operator] = {
    "gather": lambda x, i: x.gather(0, _wide(x, i)),
    "gather from behind": lambda x, i: x.gather(-3, _wide(x, i)),
    "gather along the last axis": lambda x, i: x.permute(1, 2, 0).gather(2, _last(x, i)),
    "scatter_add": lambda x, i: _none(x).scatter_add(0, _wide(x, i), x[i] * 2),
    "scatter_add from behind": lambda x, i: x.scatter_add(-3, _wide(x, i), x[i].exp()),
    "scatter_add of a longer source": lambda x, i: x.scatter_add(
        0, _wide(x, i), torch.cat([x[i], x]).sin().detach()
    ),
    "sum": lambda x, i: x.scatter_reduce(0, _wide(x, i), x[i].exp(), "sum"),
    "mean": lambda x, i: x.scatter_reduce(0, _wide(x, i), x[i].exp(), "mean"),
    "mean of these alone": lambda x, i: x.scatter_reduce(
        0, _wide(x, i), x[i].exp(), "mean", include_self=False
    ),
}
ELEMENTS: dict[str, Operator] = {
    "another for each element": lambda x, i: x.gather(
        0, (i[:, None, None] + torch.arange(4)) % 3 + 0 * _wide(x, i)
    ),
    "some columns": lambda x, i: x.gather(0, i[:, None, None].expand(-1, 2, 4)),
    "columns of a source": lambda x, i: x.scatter_add(
        0, i[:, None, None].expand(-1, 3, 2), x[i].detach()
    ),
    "the last axis": lambda x, i: x.permute(1, 2, 0).scatter_add(
        2, _last(x, i), x[i].permute(1, 2, 0).exp()
    ),
    "largest": lambda x, i: x.scatter_reduce(0, _wide(x, i), x[i].exp(), "amax"),
}


class Moving(nn.Module):
    def __init__(self, operator: Operator) -> None:
        super().__init__()
        self.operator, self.linear = operator, nn.Linear(4, 4)

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        return self.operator(self.linear(x), i).square()


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("name", [*ROWS, *ELEMENTS])
def test_rows_are_gathered_and_added_as_in_pytorch(name: str, engine: Engine) -> None:
    torch.manual_seed(0)
    module = Moving((ROWS | ELEMENTS)[name])
    model = ORTModule(module, options=Options(engine=engine, fallback="raise"))
    for nodes, edges in ((5, 9), (8, 3)):
        x, i = torch.randn(nodes, 3, 4), torch.randint(0, min(nodes, 5), (edges,))
        found = []
        for run in (model, module):
            module.zero_grad()
            given = x.clone().requires_grad_()
            output = run(given, i)
            (output * torch.arange(output.numel()).view(output.shape)).sum().backward()
            found.append([output.detach(), given.grad, *(p.grad for p in module.parameters())])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-3)
    assert model.report.graph_calls == 2
    (compiled,) = model._runner.graphs.compiled.values()
    forwards = [graph.form.way.step.plan.programs[0] for graph in compiled.graphs]
    kinds = {node.op_type for program in forwards for node in program.graph}
    # "mean of these alone" empties its rows first.
    moves = bool(kinds & {"GatherElements", "ScatterElements"})
    assert moves == (name in ELEMENTS or name == "mean of these alone")

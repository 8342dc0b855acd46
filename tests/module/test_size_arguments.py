"""A size of one tensor as an argument of an operator on another: the graph has it as it is then."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from tests.breadth import sampled
from tests.module.agreement import SAME

Operator = Callable[[Tensor, int], Tensor]

# Each of a tensor of 6 columns, and a size between 2 and 4.
OPERATORS: dict[str, Operator] = {
    "repeat_interleave of rows": lambda x, n: x.repeat_interleave(n, 0),
    "repeat_interleave of columns": lambda x, n: x.repeat_interleave(n, 1),
    "repeat_interleave of the last axis": lambda x, n: x.repeat_interleave(n, -1),
    "repeat_interleave of all elements": lambda x, n: x.repeat_interleave(n),
    "repeat_interleave with its size": lambda x, n: x.repeat_interleave(
        n, 1, output_size=x.shape[1] * n
    ),
    "repeat_interleave of three axes": lambda x, n: x.view(-1, 2, 3).repeat_interleave(n, 1),
    "kthvalue": lambda x, n: x.kthvalue(n, 1)[0],
    "addcmul": lambda x, n: torch.addcmul(x, x, x.sigmoid(), value=n),
    "scatter of a number": lambda x, n: x.scatter(1, torch.full((x.shape[0], 1), 2), n),
    "fmod": lambda x, n: torch.fmod(5 * x, n),
    "lerp": lambda x, n: torch.lerp(x, 2 * x, 1 / n),
}
SAMPLE = ("repeat_interleave of rows", "kthvalue", "addcmul", "scatter of a number")


class Sized(nn.Module):
    """An operator behind a layer, with the columns of another tensor as its argument."""

    def __init__(self, operator: Operator) -> None:
        super().__init__()
        self.linear, self.operator = nn.Linear(5, 6), operator

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.operator(self.linear(x), other.shape[1])


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("name", sampled(OPERATORS, SAMPLE))
def test_an_argument_that_is_a_size_is_that_of_the_call(name: str, engine: str) -> None:
    eager = Sized(OPERATORS[name])
    graph = ORTModule(copy.deepcopy(eager), options=Options(engine=engine, fallback="raise"))
    for rows, size in ((4, 3), (3, 2), (4, 4)):
        x, other = torch.randn(rows, 5), torch.zeros(rows, size)
        found = []
        for module in (eager, graph):
            module.zero_grad()
            output = module(x, other)
            output.square().sum().backward()
            gradient = next(module.parameters()).grad
            assert gradient is not None
            found.append((output.detach(), gradient.clone()))
        for mine, its in zip(found[1], found[0], strict=True):
            largest = float(its.abs().max())
            torch.testing.assert_close(mine, its, rtol=SAME, atol=SAME * largest)
    assert graph.report.mode == "graph"

"""What is made of nothing inside of a forward: sums are 0, means NaN, and none of it is true."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ortrain import ORTModule
from tests.module.agreement import GRAPH, Called

# Of a tensor of four columns; rows are of any number, at least one.
MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "any": lambda x: (x[:, 4:] > 0).any(),
    "any along": lambda x: (x[:, 4:] > 0).any(1) | (x[:, 0] > 1),
    "all": lambda x: (x[:, 4:] > 0).all(1),
    "sum": lambda x: x[1:].sum(0) + x[0],
    "mean": lambda x: x[1:].mean(0) + x[0],
    "mean of all": lambda x: x[1:].mean() * x[0],
    "mean of what is chosen": lambda x: x[x[:, 0] > 9].mean() * x[0],
    "var": lambda x: x[1:].var(0) + x[0],
    "var, biased": lambda x: x[1:].var(0, correction=0) + x[0],
    "std": lambda x: x[1:].std() + x[0],
    "var_mean": lambda x: torch.stack(torch.var_mean(x[1:], 0)),
    "prod": lambda x: x[1:].prod(0) * x[0],
    "logsumexp": lambda x: x[1:].logsumexp(0) + x[0],
    "norm": lambda x: x[1:].norm(dim=0) + x[0],
    "cumsum": lambda x: torch.cat([x[1:].cumsum(0), x]),
    "softmax": lambda x: x[1:].softmax(1).sum() + x[0],
    "matmul": lambda x: x[:, 4:] @ x[:, 4:].T + x[:, :1],
    "linear": lambda x: F.linear(x[:, 4:], x[:1, 4:]) + x[:, :1],
    "mse": lambda x: F.mse_loss(x[1:], x[:-1]) + x[0],
    "l1, summed": lambda x: F.l1_loss(x[1:], x[:-1], reduction="sum") + x[0],
    "counted": lambda x: torch.count_nonzero(x[1:]) + x[0],
}


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")
@pytest.mark.parametrize("name", MADE)
def test_nothing_makes_what_pytorch_makes_of_it(name: str) -> None:
    module = Called(MADE[name])
    model = ORTModule(module, options=GRAPH)
    for rows in (3, 1, 2, 1):
        gradients = []
        x = torch.randn(rows, 4)
        for run in (model, module):
            given = x.clone().requires_grad_()
            output = run(given)
            if output.requires_grad:
                output.sum().backward()
            gradients.append((output.detach(), given.grad))
        torch.testing.assert_close(*gradients, equal_nan=True)

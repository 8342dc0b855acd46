"""An operator without a translation, or without a gradient in ONNX, is a node that PyTorch runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kept.twins import Twins

_LIBRARY = torch.library.Library("ortrain_tests", "FRAGMENT")


@torch.library.custom_op("ortrain_tests::sorted_rows", mutates_args=())
def sorted_rows(x: Tensor, factor: float = 2.0) -> tuple[Tensor, Tensor]:
    values, order = x.sort(-1)
    return values * factor, order


@sorted_rows.register_fake
def _(x: Tensor, factor: float = 2.0) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.int64)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[1])
    ctx.factor = inputs[1]


def _backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
    (order,) = ctx.saved_tensors
    return torch.zeros_like(gradient).scatter(-1, order, gradient * ctx.factor * 3), None


sorted_rows.register_autograd(_backward, setup_context=_setup)


def pairs(x: Tensor, count: int) -> Tensor:
    """Matrices of one half of each row times the next, [rows, count, count]."""
    return x[:, :count, None] * x[:, None, count : 2 * count] + 5 * torch.eye(count)


def triangle(x: Tensor) -> Tensor:
    result: Tensor = torch.linalg.qr(x.T)[1]
    return result


KINDS: dict[str, Any] = {
    "custom": lambda x: sorted_rows(x)[0],
    "custom, two outputs": lambda x: sorted_rows(x, 0.5)[0] + sorted_rows(x)[1],
    "slogdet": lambda x: x + torch.linalg.slogdet(pairs(x, 4))[1][:, None],
    "cholesky": lambda x: x + torch.linalg.cholesky(x.T @ x + torch.eye(8)).sum(0),
    "det": lambda x: x + torch.linalg.det(pairs(x, 2))[:, None],
    "svdvals": lambda x: x * torch.linalg.svdvals(x).sum(),
    "lgamma, of primitives without a derivative": lambda x: torch.lgamma(x.abs() + 0.5),
    "cumprod, likewise": lambda x: torch.cumprod(x, 1),
    "mvlgamma, of another such": lambda x: torch.mvlgamma(x.abs() + 2, 2),
    "cdist": lambda x: x + torch.cdist(x, x + 1, p=3.0).sum(-1, keepdim=True),
    "a matrix of rows": lambda x: torch.linalg.cholesky(x @ x.T + torch.eye(x.shape[0])) @ x,
    "a list of tensors": lambda x: x + torch.linalg.multi_dot([x, x.T, x]) + triangle(x).sum(),
}


class Around(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(8, 8), nn.Linear(8, 3), function

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.relu(self.function(torch.tanh(self.first(x)))))
        return result


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_operator_gives_what_pytorch_gives(kind: str, engine: str) -> None:
    twins = Twins(Around(KINDS[kind]), engine)
    twins.tolerance = 1e-4
    for rows in (5, 3, 5):
        twins.step(torch.randn(rows, 8, requires_grad=True))
    twins.step(torch.randn(4, 8), grad=False)

"""Code that writes to what it holds in its forward, counted by PyTorch or not, trains as in eager.

The code is captured, or stays PyTorch's as a module that is named, or as a method that computes
with NumPy. What it holds is a buffer, a parameter or an attribute; other parts of the graph read it
before, after or not at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from tests.breadth import table

SIZE = 12
pytestmark = pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")


def _replaced(holder: Any, y: Tensor) -> None:
    if not isinstance(holder.held, nn.Parameter):
        holder.held = 0.9 * holder.held.detach() + 0.1 * y.mean(0)


def _new_data(holder: Any, y: Tensor) -> None:
    holder.held.data = 0.9 * holder.held.data + 0.1 * y.mean(0)


def _by_numpy(holder: Any, y: Tensor) -> None:
    held = holder.held.detach().numpy()
    held *= 0.9


WRITES: dict[str, Callable[[Any, Tensor], Any]] = {
    "in place": lambda m, y: m.held.mul_(0.9).add_(y.mean(0), alpha=0.1),
    "data in place": lambda m, y: m.held.data.mul_(0.9).add_(y.mean(0), alpha=0.1),
    "data copied": lambda m, y: m.held.data.copy_(0.9 * m.held.data + 0.1 * y.mean(0)),
    "new data": _new_data,
    "an element": lambda m, y: m.held.__setitem__(0, y.mean()),
    "an element of data": lambda m, y: m.held.data.__setitem__(0, y.mean()),
    "detached": lambda m, y: m.held.detach().mul_(0.9).add_(y.mean(0), alpha=0.1),
    "a view": lambda m, y: m.held.view(-1, 4).mul_(0.9),
    "a view of data": lambda m, y: m.held.data.view(-1, 4)[1].add_(y.mean()),
    "foreach": lambda m, y: torch._foreach_mul_([m.held.data], 0.9),
    "out": lambda m, y: torch.mul(m.held.data, 0.9, out=m.held.data),
    "index_copy": lambda m, y: m.held.data.index_copy_(0, torch.tensor([0, 1]), m.held[:2] * 0.7),
    "NumPy": _by_numpy,
    "filled": lambda m, y: m.held.data.fill_(3.0),
    "cleared and added to": lambda m, y: m.held.data.zero_().add_(y.sum(0)),
    "replaced": _replaced,
    "reversed": lambda m, y: m.held.data.copy_(m.held.data.flip(0)),
}
HOLDERS = ["buffer", "frozen", "parameter", "attribute"]
READERS = ["before", "after", "nobody else"]


class Writer(nn.Module):
    """Doubles, and writes to what it holds."""

    def __init__(self, write: str, holder: str, *, in_numpy: bool, rows: int) -> None:
        super().__init__()
        self.write, self.in_numpy = WRITES[write], in_numpy
        value = torch.linspace(0.5, 2.0, rows * SIZE).view(rows, SIZE).squeeze(0)
        if holder == "buffer":
            self.register_buffer("held", value)
        elif holder == "attribute":
            self.held = value
        else:
            self.held = nn.Parameter(value, requires_grad=holder == "parameter")

    def update(self, y: Tensor) -> Tensor:
        with torch.no_grad():
            if self.in_numpy:
                np.linalg.svd(y.detach().numpy())
            self.write(self, y.detach())
        return y * 2

    def forward(self, y: Tensor) -> Tensor:
        return self.update(y)


class Around(nn.Module):
    """Layers around a writer, which may read what it holds."""

    def __init__(self, writer: Writer, reader: str) -> None:
        super().__init__()
        self.first, self.writer, self.last = nn.Linear(SIZE, SIZE), writer, nn.Linear(SIZE, SIZE)
        self.reader = reader

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        if self.reader == "before":
            y = y + self.writer.held.detach().mean()
        y = self.writer(y)
        if self.reader == "after":
            y = y * self.writer.held.mean()
        result: Tensor = self.last(y)
        return result


def made(how: str, write: str, holder: str, reader: str, rows: int) -> Around:
    torch.manual_seed(0)
    return Around(Writer(write, holder, in_numpy=how == "routine", rows=rows), reader)


def trained(model: nn.Module, plain: Around) -> list[Tensor] | str:
    """What four steps give and leave; or the error of the first that fails."""
    found = []
    try:
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            output = model(torch.randn(4, SIZE, generator=generator))
            output.sum().backward()
            found += [output.detach().clone(), plain.writer.held.detach().clone()]
            found += [p.grad.clone() for p in plain.parameters() if p.grad is not None]
            model.zero_grad()
    except RuntimeError as error:
        return str(error).partition("[")[0]
    return found


CASES = [
    (how, write, holder, READERS[i % 3], 1 + i // 3 % 2)
    for i, (how, holder, write) in enumerate(
        itertools.product(["captured", "module", "routine"], HOLDERS, WRITES)
    )
]


@pytest.mark.parametrize(("how", "write", "holder", "reader", "rows"), table(CASES, one_in=4))
def test_what_a_forward_writes_is_as_in_eager(
    how: str, write: str, holder: str, reader: str, rows: int
) -> None:
    eager, graph = (made(how, write, holder, reader, rows) for _ in range(2))
    kept = ("writer",) if how == "module" else ()
    wrapped = ORTModule(graph, options=Options(engine="aten", keep_in_torch=kept))
    expected, found = trained(eager, eager), trained(wrapped, graph)
    if isinstance(expected, str):
        assert found == expected
    else:
        torch.testing.assert_close(found, expected)

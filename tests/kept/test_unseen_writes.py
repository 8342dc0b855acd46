"""Code that writes to what it holds in its forward, counted by PyTorch or not, trains as in eager.

The code is captured, or stays PyTorch's as a module that is named, or as a method that computes
with NumPy. What it holds is a buffer, a parameter or an attribute; other parts of the graph read it
before, after or not at all. Or it is an argument of the code, which others have as well.
"""

from __future__ import annotations

import copy
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


def compare(found: list[Tensor] | str, expected: list[Tensor] | str) -> None:
    """The numbers of steps, or the errors, with those of eager."""
    if isinstance(expected, str):
        assert found == expected
    else:
        torch.testing.assert_close(found, expected)


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
    compare(trained(wrapped, graph), trained(eager, eager))


class Fills(torch.autograd.Function):
    """Doubles, and writes to what it is given to work in."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, scratch: Tensor, write: str) -> Tensor:
        WRITES[write](_Held(scratch), y.clamp(min=0))
        return y * 2 + scratch.mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * 2, None, None


class _Held:
    def __init__(self, held: Tensor) -> None:
        self.held = held


class FillsIn(nn.Module):
    """The same as a module, and as a method."""

    def forward(self, y: Tensor, scratch: Tensor, write: str) -> Tensor:
        WRITES[write](_Held(scratch), y.detach().clamp(min=0))
        return y * 2 + scratch.mean()

    def in_numpy(self, y: Tensor, scratch: Tensor, write: str) -> Tensor:
        np.linalg.svd(y.detach().numpy())
        WRITES[write](_Held(scratch), y.detach().clamp(min=0))
        return y * 2 + scratch.mean()


class Worker(nn.Module):
    """Has code work in a tensor, and reads that tensor itself."""

    def __init__(self, how: str, write: str, source: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.fills, self.how, self.write, self.source = FillsIn(), how, write, source
        self.register_buffer("state", torch.ones(SIZE))
        self.attribute = torch.ones(SIZE)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        with torch.no_grad():
            scratch = SCRATCHES[self.source](self, y)
        calls: dict[str, Any] = {
            "captured": self.fills,
            "function": Fills.apply,
            "module": self.fills,
            "routine": self.fills.in_numpy,
        }
        call = calls[self.how]
        result: Tensor = self.last(call(y, scratch, self.write)) * scratch
        return result


# The graph of a first batch has them as constants, as values of its own, or as those of others.
SCRATCHES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "zeros": lambda m, y: torch.zeros(SIZE),
    "counted": lambda m, y: torch.arange(SIZE) * 1.0,
    "literal": lambda m, y: torch.tensor([0.5] * SIZE),
    "computed": lambda m, y: y.mean(0),
    "state": lambda m, y: m.state,
    "empty": lambda m, y: torch.empty_like(y[0]).fill_(1.0),
    "attribute": lambda m, y: m.attribute,
}
ARGUMENTS = [
    (how, write, source)
    for how, write, source in itertools.product(
        ["captured", "function", "module", "routine"], WRITES, SCRATCHES
    )
    if write != "replaced"  # by which an argument gets another name alone
]


@pytest.mark.parametrize(("how", "write", "source"), table(ARGUMENTS, one_in=4))
def test_what_code_writes_to_its_argument_is_as_in_eager(how: str, write: str, source: str) -> None:
    """The first batch writes what is there, so that no comparison of that one tells of it."""
    torch.manual_seed(0)
    eager = Worker(how, write, source)
    graph = copy.deepcopy(eager)
    kept = ("fills",) if how == "module" else ()
    wrapped = ORTModule(graph, options=Options(engine="aten", keep_in_torch=kept))
    compare(worked(wrapped, graph), worked(eager, eager))


def worked(model: nn.Module, plain: Worker | Weighing) -> list[Tensor] | str:
    """What four steps give and leave; or the error of the first that fails."""
    found = []
    try:
        for step in range(4):
            with torch.no_grad():
                plain.first.bias.fill_(step - 4.0 if step == 0 else step)
            generator = torch.Generator().manual_seed(step)
            output = model(torch.randn(4, SIZE, generator=generator))
            output.sum().backward()
            found += [output.detach().clone(), plain.state.clone(), plain.attribute.clone()]
            found += [p.grad.clone() for p in plain.parameters() if p.grad is not None]
            model.zero_grad()
    except RuntimeError as error:
        return str(error).partition("[")[0]
    return found


class WritesBackward(torch.autograd.Function):
    """Weighs a row, and writes in its backward to what it has saved."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, what: int, write: str) -> Tensor:
        result = y * weights
        ctx.save_for_backward(y, weights, result)
        ctx.what, ctx.write = what, write
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        saved = ctx.saved_tensors
        found = gradient * saved[1] + 0.1 * saved[0] + 0.1 * saved[2]
        WRITES[ctx.write](_Held(saved[ctx.what]), gradient)
        return found, None, None, None


class Weighing(nn.Module):
    """Has a function write in its backward to what others have as well."""

    def __init__(self, what: int, write: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.what, self.write = what, write
        self.register_buffer("state", torch.ones(SIZE))
        self.attribute = torch.ones(SIZE)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        weights = torch.tensor([0.5] * SIZE)
        weighed = WritesBackward.apply(y, weights, self.what, self.write)
        result: Tensor = self.last(weighed) * weights + y.sin()
        return result


BACKWARDS = [
    (what, write)
    for what, write in itertools.product(["its argument", "a constant", "its result"], WRITES)
    if write != "replaced"
]


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize(("what", "write"), table(BACKWARDS, one_in=4))
def test_what_a_backward_writes_is_as_in_eager(engine: str, what: str, write: str) -> None:
    torch.manual_seed(0)
    eager = Weighing(["its argument", "a constant", "its result"].index(what), write)
    graph = copy.deepcopy(eager)
    wrapped = ORTModule(graph, options=Options(engine=engine))
    compare(worked(wrapped, graph), worked(eager, eager))


class TwoResults(nn.Module):
    """Doubles, and passes something on that has no gradient."""

    def forward(self, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return y * 2, x * 3

    def in_numpy(self, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        np.linalg.svd(y.detach().numpy())
        return y * 2, x * 3


class Remembering(nn.Module):
    """Writes to an attribute what a call gives besides its result."""

    def __init__(self, how: str, write: str) -> None:
        super().__init__()
        self.first, self.calls = nn.Linear(SIZE, SIZE), TwoResults()
        self.how, self.write = how, write
        self.held = torch.ones(SIZE)
        self.in_a_list = [torch.ones(SIZE)]

    def forward(self, x: Tensor) -> Tensor:
        call = self.calls.in_numpy if self.how == "routine" else self.calls
        y, seen = call(self.first(x), x)
        WRITES[self.write](self, seen)
        WRITES[self.write](_Held(self.in_a_list[0]), seen)
        result: Tensor = y
        return result


@pytest.mark.parametrize("how", ["captured", "module", "routine"])
@pytest.mark.parametrize("write", [each for each in WRITES if each not in ("replaced", "NumPy")])
def test_a_trace_leaves_no_history_on_an_attribute(how: str, write: str) -> None:
    """In a trace what a call gives may all have a gradient; a backward of it would go there."""
    torch.manual_seed(0)
    eager = Remembering(how, write)
    graph = copy.deepcopy(eager)
    kept = ("calls",) if how == "module" else ()
    wrapped = ORTModule(graph, options=Options(engine="aten", keep_in_torch=kept))
    for step in range(3):
        x = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(step))
        eager(x).sum().backward()
        wrapped(x).sum().backward()
        torch.testing.assert_close(graph.held, eager.held)
        for tensor in (graph.held, graph.in_a_list[0]):
            assert not tensor.requires_grad

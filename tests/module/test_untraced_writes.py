"""Tensors that a module holds beside parameters and buffers are read as they are at each call.

Writes through ``tensor.data`` or NumPy count no version.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from ortrain.frontend.export import export
from ortrain.program import Role
from tests.breadth import crossed

pytestmark = pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
SIZE, ROWS = 12, 4

Use = Callable[[Tensor, Tensor], Any]
USES: dict[str, Use] = {
    "product": lambda y, t: y @ t,
    "a row": lambda y, t: y * t[0],
    "a sum": lambda y, t: y * t.sum(),
    "a branch": lambda y, t: y * 2 if t[0, 0] > 2.5 else y * 3,
    "an element": lambda y, t: y * t[0, 0].item(),
    "elements": lambda y, t: y * t[0].tolist()[1],
    "a size": lambda y, t: y.repeat(1, int(t[0, 0]) + 1),
    "NumPy": lambda y, t: y * torch.from_numpy(t.detach().numpy()[0]),
    "indices": lambda y, t: y[:, t[0].long() % SIZE],
    "a choice": lambda y, t: torch.where(t[:ROWS] > 2, y, -y),
    "narrow": lambda y, t: y @ t.bfloat16().float(),
    "complex": lambda y, t: torch.view_as_real(_complex(y) * _complex(t[:ROWS])).flatten(1),
    "a table": lambda y, t: y + nn.functional.embedding(torch.tensor([0, 1, 2, 0]), t),
    "a copy that is written to": lambda y, t: y @ t.clone().mul_(2),
    "data": lambda y, t: y @ t.data,
    "an output": lambda y, t: (y * 2, t),
    "an output of its own": lambda y, t: (y * 2, t * 2),
    "places": lambda y, t: y.sum() * torch.nonzero(t > 2).sum(),
    "a question": lambda y, t: y * 2 if bool((t > 2).any()) else y,
}  # fmt: skip


def _complex(tensor: Tensor) -> Tensor:
    return torch.view_as_complex(tensor.reshape(ROWS, SIZE // 2, 2).contiguous())


def plain(tensor: Tensor, step: int) -> None:
    tensor[0] = step + 1.0


def data(tensor: Tensor, step: int) -> None:
    tensor.data[0] = step + 1.0


def one_element(tensor: Tensor, step: int) -> None:
    tensor.data[SIZE // 2, SIZE // 3] += step + 1.0


def moving_average(tensor: Tensor, step: int) -> None:
    tensor.data.mul_(0.9).add_(torch.full_like(tensor, step + 1.0), alpha=0.5)


def numpy(tensor: Tensor, step: int) -> None:
    tensor.numpy()[0] = step + 1.0


WRITES = {each.__name__: each for each in (plain, data, one_element, moving_average, numpy)}
ENGINES = ["aten", "onnxruntime"]

_of_a_file = torch.ones(SIZE, SIZE)


class Held(nn.Module):
    """A linear layer, and a tensor in one of the places where code may have one."""

    def __init__(self, use: str, place: str) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.use = USES[use]
        tensor = _of_a_file if place == "a global" else torch.ones(SIZE, SIZE)
        if place == "a transposed attribute":
            self.held: Any = tensor.t()
        elif place == "part of another":
            self.held = torch.ones(2 * SIZE, SIZE)[SIZE:]
        elif place == "a list":
            self.held = [tensor]
        elif place == "a dict in a list":
            self.held = [{"it": tensor}]
        elif place == "a closure":
            self.held = lambda: tensor
        elif place == "a global":
            self.held = _global
        else:
            self.held = tensor

    def tensor(self) -> Tensor:
        held = self.held
        if isinstance(held, list):
            held = held[0]
        if isinstance(held, dict):
            held = held["it"]
        found: Tensor = held if isinstance(held, Tensor) else held()
        return found

    def forward(self, x: Tensor) -> Any:
        return self.use(self.linear(x), self.tensor())


def _global() -> Tensor:
    return _of_a_file


PLACES = [
    "an attribute",
    "a transposed attribute",
    "part of another",
    "a list",
    "a dict in a list",
    "a closure",
    "a global",
]


def trained(model: nn.Module, held: Tensor, write: Callable[[Tensor, int], None]) -> list[Tensor]:
    """What five steps give, with a write after each."""
    found = []
    with torch.no_grad():
        held.copy_(torch.ones(SIZE, SIZE))
    x = torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(1))
    for step in range(5):
        outputs = model(x)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        outputs[0].sum().backward()
        found += [output.detach().clone() for output in outputs]
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        with torch.no_grad():
            write(held, step)
    return found


def check(use: str, place: str, write: Callable[[Tensor, int], None], engine: Any) -> ORTModule:
    torch.manual_seed(0)
    eager = Held(use, place)
    graph = Held(use, place)
    graph.load_state_dict(copy.deepcopy(eager.state_dict()))
    wrapped = ORTModule(graph, options=Options(engine=engine))
    expected = trained(eager, eager.tensor(), write)
    torch.testing.assert_close(trained(wrapped, graph.tensor(), write), expected)
    return wrapped


@pytest.mark.parametrize(("use", "write", "engine"), crossed(USES, WRITES, ENGINES, one_in=3))
def test_every_use_sees_every_write(use: str, write: str, engine: str) -> None:
    check(use, "an attribute", WRITES[write], engine)


@pytest.mark.parametrize(("place", "write", "engine"), crossed(PLACES, WRITES, ENGINES, one_in=3))
def test_every_place_is_read_at_each_call(place: str, write: str, engine: str) -> None:
    wrapped = check("product", place, WRITES[write], engine)
    assert wrapped.report.graph_calls == 5
    if write != "plain":
        assert wrapped.report.captures == 1


@pytest.mark.parametrize("form", ["as it is", "transposed", "of doubles", "conjugate", "part"])
@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
def test_rotations_that_a_module_holds_are_read_at_each_call(form: str, engine: Any) -> None:
    """As Llama's first code has them: complex, beside parameters and buffers."""
    angles = torch.randn(40, SIZE // 2, generator=torch.Generator().manual_seed(0))

    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(SIZE, SIZE)
            held = torch.polar(torch.ones_like(angles), angles)
            if form == "transposed":
                held = held.t().contiguous().t()
            elif form == "of doubles":
                held = held.to(torch.complex128)
            elif form == "conjugate":
                held = held.conj()
            elif form == "part":
                held = held[7:, :]
            self.held = held

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = torch.view_as_complex(self.linear(x).reshape(*x.shape[:-1], SIZE // 2, 2))
            return torch.view_as_real(y * self.held[: x.shape[1]].to(torch.complex64)).flatten(2)

    torch.manual_seed(0)
    eager, graph = Rotated(), Rotated()  # a deep copy would have conjugates lie in memory
    graph.load_state_dict(eager.state_dict())
    wrapped = ORTModule(graph, options=Options(engine=engine))
    for step in range(4):
        x = torch.randn(2, 5 + step % 2, SIZE)
        torch.testing.assert_close(wrapped(x), eager(x))
        for model in (eager, graph):
            model.held.data.mul_(1.5)
    assert wrapped.report.graph_calls == 4


def test_what_a_call_makes_is_a_constant_of_any_size() -> None:
    class Ramp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(SIZE, SIZE)

        def forward(self, x: Tensor) -> Tensor:
            ramp: Tensor = self.linear(x) * torch.tensor([float(i) for i in range(SIZE)])
            return ramp

    torch.manual_seed(0)
    eager = Ramp()
    wrapped = ORTModule(copy.deepcopy(eager), options=Options(engine="aten"))
    x = torch.randn(ROWS, SIZE)
    for _ in range(2):
        torch.testing.assert_close(wrapped(x), eager(x))


def test_programs_that_differ_in_such_contents_alone_are_one_in_the_cache(tmp_path: Any) -> None:
    options = Options(engine="aten", cache_dir=tmp_path)
    x = torch.randn(ROWS, SIZE)
    kept = []
    for factor in (1.0, 3.0):
        module = Held("product", "an attribute")
        module.held = torch.full((SIZE, SIZE), factor)
        torch.testing.assert_close(ORTModule(module, options=options)(x), module(x))
        kept.append(sorted(path.name for path in tmp_path.rglob("*") if path.is_file()))
    assert kept[0]
    assert kept[1] == kept[0]


def test_the_program_of_a_file_keeps_them_as_constants() -> None:

    module = Held("product", "an attribute")
    exported = export(module, (torch.randn(ROWS, SIZE),))
    assert not exported.program.inputs(Role.BUFFER)

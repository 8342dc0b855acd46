"""Code that computes with arrays of NumPy: it has the values of each call, and runs once."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from ortrain.pytorch.arrays import ARRAYS

# What a module's code makes of an array, as a factor.
READS: dict[str, Callable[[Any], Any]] = {
    "float": lambda m: float(m.number),
    "int": lambda m: int(m.number),
    "condition": lambda m: 2.0 if m.number > 3 else 3.0,
    "flag": lambda m: 2.0 if m.flag else 3.0,
    "item": lambda m: m.array[0].item(),
    "sum": lambda m: float(m.array.sum()),
    "any": lambda m: float((m.array > 3).any()),
    "Python's max": lambda m: float(max(m.array)),
    "Python's round": lambda m: round(float(m.number)),
    "square root": lambda m: math.sqrt(m.number),
    "complex": lambda m: complex(m.number).real,
    "text": lambda m: float(f"{m.number}"),
    "length of text": lambda m: len(str(m.array)),
    "bytes": lambda m: sum(m.array.tobytes()) % 7,
    "length": lambda m: len(m.array[m.array > 3]),
    "index": lambda m: [1.0, 2.0, 3.0, 4.0, 5.0, 6.0][m.place],
    "in a table": lambda m: float(m.table["a"]),
    "as a tensor": lambda m: torch.from_numpy(m.array)[0],
    "a copied tensor": lambda m: torch.tensor(m.array)[0],
    "product": lambda m: float(m.array @ m.array),
}


def _added(array: Any) -> None:
    array += 2.0


def _scaled(array: Any) -> None:
    array *= 0.5


def _divided(array: Any) -> None:
    array /= 2.0


def _powered(array: Any) -> None:
    array **= 2


def _a_part(array: Any) -> None:
    array[1:] -= 1.0


def _by_itself(array: Any) -> None:
    array += array


# What it writes to one.
WRITES: dict[str, Callable[[Any], None]] = {
    f.__name__: f for f in (_added, _scaled, _divided, _powered, _a_part, _by_itself)
}
WRITES["item"] = lambda array: array.__setitem__(0, array[0] * 3)
WRITES["out"] = lambda array: np.add(array, 1.0, out=array)
WRITES["sort"] = lambda array: array.sort()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.layer(x))) * 2


class Model(nn.Module):
    def __init__(self, read: Callable[[Any], Any], write: Callable[[Any], None]) -> None:
        super().__init__()
        self.first, self.last = Inner(), Inner()
        self.read, self.write = read, write
        self.array, self.number, self.flag = np.array([3.0, 2.0, 1.0]), np.array(1.0), np.array(0)
        self.place, self.table = np.array(1), {"a": np.array(2.0)}
        self.register_buffer("state", torch.tensor([3.0, 2.0, 1.0]))

    def arrays(self) -> list[Any]:
        return [self.array, self.number, self.flag, self.place, self.table["a"]]

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) * self.read(self)
        self.write(self.array)
        state = self.state.detach().numpy()
        self.write(state)
        return self.last(x) * self.state.sum()


def _nothing(array: Any) -> None:
    pass


def train(model: Any, module: Model, *, changes: bool) -> list[Any]:
    found: list[Any] = []
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4)
    for step in range(5):
        if changes and step > 2:
            module.array += 2.0
            module.number += 2.0
            module.place += 1
            module.flag[()] = 1 - module.flag
            module.table["a"] += 1.0
        loss = model(x)
        loss.sum().backward()
        found += [loss.detach().clone(), *(np.copy(each) for each in module.arrays())]
        found += [module.state.clone()]
    return [*found, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("name", READS)
def test_a_call_has_the_values_that_arrays_have_in_it(name: str, engine: Any) -> None:
    torch.manual_seed(0)
    module = Model(READS[name], _nothing).double()
    expected = train(eager := copy.deepcopy(module), eager, changes=True)
    model = ORTModule(module, options=Options(engine=engine))
    found = train(model, module, changes=True)
    assert model.report.mode == "graph"
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("engine", ["aten", "auto"])
@pytest.mark.parametrize("name", WRITES)
def test_what_a_call_writes_to_an_array_is_written_once(name: str, engine: Any) -> None:
    torch.manual_seed(0)
    module = Model(READS["sum"], WRITES[name]).double()
    with np.errstate(all="ignore"):
        expected = train(eager := copy.deepcopy(module), eager, changes=False)
        found = train(ORTModule(module, options=Options(engine=engine)), module, changes=False)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-9, atol=1e-9)


NUMBERS: dict[str, Callable[[Any], Any]] = {
    "a root of a constant": lambda m: np.sqrt(64),
    "a narrow number": lambda m: np.float32(0.1),
    "an attribute": lambda m: m.scale,
    "pi": lambda m: np.pi,
    "the least step": lambda m: np.finfo(np.float32).eps,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_numpy_scales_in_one_graph(name: str) -> None:
    torch.manual_seed(0)
    module = Model(NUMBERS[name], _nothing)
    module.scale = np.float64(np.sqrt(3.0))

    def forward(x: Tensor) -> Tensor:
        return module.last(module.first(x) * module.read(module))

    module.forward = forward  # type: ignore[method-assign]
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    expected = module(x)
    model = ORTModule(module, options=Options(engine="aten"))
    torch.testing.assert_close(model(x), expected)
    assert (model.report.mode, model.report.breaks) == ("graph", ())


class Around(nn.Module):
    """Layers that do without arrays, within one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Inner() for _ in range(3))
        self.array = np.array([1.0, 2.0])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * float(self.array.sum())
        return x


def test_layers_inside_have_graphs() -> None:
    module = Around()
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    expected = module(x)
    model = ORTModule(module, options=Options(engine="aten"))
    torch.testing.assert_close(model(x), expected)
    assert model.report.mode == "graph"
    assert ARRAYS in model.report.breaks

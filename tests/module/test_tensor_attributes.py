"""What Python code puts on parameters and buffers, as mup does, is state of a forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule

pytestmark = pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")


class Shape:
    """What a library may know of a weight."""

    def __init__(self, multiple: float) -> None:
        self.multiple = multiple


class Layer(nn.Module):
    """Reads what is on its weight or its buffer."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("offset", torch.ones(4))
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.read(self) + self.offset


def _own(attribute: str, value: Any) -> Callable[[Layer], None]:
    return lambda layer: setattr(layer.linear.weight, attribute, copy.deepcopy(value))


def _on_buffer(layer: Layer) -> None:
    layer.offset.gain = getattr(layer.offset, "gain", 1.0) * 3.0  # type: ignore[attr-defined]


def _on_shape(layer: Layer) -> None:
    layer.linear.weight.shape_of = Shape(layer.linear.weight.shape_of.multiple + 1.0)  # type: ignore[attr-defined]


def _in_place(layer: Layer) -> None:
    layer.linear.weight.factor.mul_(3.0)  # type: ignore[attr-defined]


def _removed(layer: Layer) -> None:
    vars(layer.linear.weight).pop("gain", None)


CASES: dict[str, tuple[Any, Any, Any]] = {
    "a number": (
        _own("gain", 2.0),
        lambda m: m.linear.weight.gain,
        _own("gain", 3.0),
    ),
    "one that is added": (
        lambda layer: None,
        lambda m: getattr(m.linear.weight, "gain", 1.0),
        _own("gain", 3.0),
    ),
    "one that is removed": (
        _own("gain", 2.0),
        lambda m: m.linear.weight.gain if hasattr(m.linear.weight, "gain") else 5.0,
        _removed,
    ),
    "an object": (
        _own("shape_of", Shape(2.0)),
        lambda m: m.linear.weight.shape_of.multiple,
        _on_shape,
    ),
    "a tensor that is written to": (
        _own("factor", torch.tensor(2.0)),
        lambda m: m.linear.weight.factor,
        _in_place,
    ),
    "of a buffer": (_on_buffer, lambda m: m.offset.gain, _on_buffer),
}


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("kind", CASES)
def test_an_attribute_of_a_tensor_is_read_as_in_pytorch(kind: str, engine: Any) -> None:
    begin, read, change = CASES[kind]
    torch.manual_seed(0)
    plain, module = (Layer(read) for _ in range(2))
    module.load_state_dict(plain.state_dict())
    for each in (plain, module):
        begin(each)
    model = ORTModule(module, options=Options(engine=engine))
    for step in range(5):
        if step in (2, 3):
            for each in (plain, module):
                change(each)
        x, found = torch.randn(3, 4), []
        for each in (plain, model):
            each.zero_grad()
            output = each(x)
            output.square().sum().backward()
            found.append([output.detach(), *(p.grad.clone() for p in each.parameters())])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    if kind != "a tensor that is written to":
        assert model.report.mode == "graph"


def test_a_second_derivative_and_a_kept_module_read_it_too() -> None:
    torch.manual_seed(0)
    plain = Layer(lambda m: m.linear.weight.gain)
    _own("gain", 2.0)(plain)
    x = torch.randn(3, 4, requires_grad=True)

    def second(model: nn.Module) -> Tensor:
        (first,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    model = ORTModule(plain, options=Options(engine="aten"))
    torch.testing.assert_close(second(model), second(plain))
    before = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    both = nn.Sequential(before, plain, nn.Linear(4, 2))
    options = Options(engine="aten", keep_in_torch=["1"], fallback="raise")
    kept = ORTModule(both, options=options)
    torch.testing.assert_close(kept(x), both(x))
    assert kept.report.mode == "graph"


def test_what_no_code_names_costs_nothing() -> None:
    module = Layer(lambda m: 2.0)
    model = ORTModule(module, options=Options(engine="aten", fallback="raise"))
    for step in range(4):
        model(torch.randn(3, 4)).sum().backward()
        module.linear.weight.noted_by_a_script = step  # type: ignore[attr-defined]
    assert model.report.captures == 1
    assert model.report.graph_calls == 4


def _reads(x: Tensor) -> Tensor:
    return x * getattr(x, "gain", 1.0)


def _marks_input(x: Tensor) -> Tensor:
    x.seen = True  # type: ignore[attr-defined]
    return x


def _marks_output(x: Tensor) -> Tensor:
    y = x * 2
    y.scaled_by = 2  # type: ignore[attr-defined]
    return y


class Around(nn.Module):
    """A function of tensors, of which a layer has made one."""

    def __init__(self, before: Any, after: Any) -> None:
        super().__init__()
        self.linear, self.before, self.after = nn.Linear(4, 4), before, after

    def forward(self, x: Tensor) -> Any:
        return self.after(self.linear(self.before(x)))


def _same(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize(
    ("before", "after"),
    [(_reads, _same), (_marks_input, _same), (_same, _marks_output)],
    ids=["read of an argument", "written to an argument", "written to a result"],
)
def test_attributes_of_arguments_and_results_are_those_that_pytorch_has(
    before: Any, after: Any, engine: Any
) -> None:
    torch.manual_seed(0)
    plain, module = (Around(before, after) for _ in range(2))
    module.load_state_dict(plain.state_dict())
    model = ORTModule(module, options=Options(engine=engine))
    for step in range(4):
        x, found = torch.randn(3, 4), []
        for each in (plain, model):
            given = x.clone()
            if step >= 2:
                given.gain = float(step)  # type: ignore[attr-defined]
            output = each(given)
            output.sum().backward()
            marks = getattr(given, "seen", None), getattr(output, "scaled_by", None)
            found.append((output.detach(), marks))
        torch.testing.assert_close(found[0][0], found[1][0])
        assert found[0][1] == found[1][1]
    assert model.report.graph_calls == 4


def test_attributes_of_arguments_that_no_code_names_are_nothing_to_a_graph() -> None:
    model = ORTModule(Around(_same, _same), options=Options(engine="aten", fallback="raise"))
    for step in range(3):
        x = torch.randn(3, 4)
        x.number_of_the_batch = step  # type: ignore[attr-defined]
        model(x).sum().backward()
    assert model.report.graph_calls == 3

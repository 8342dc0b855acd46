"""A forward that a library binds to an ORTModule, as trl's trainers do with their losses."""

from __future__ import annotations

import functools
import gc
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from ortrain.errors import OrtrainWarning


class Classifier(nn.Module):
    """A body and a head, of which a loss may take the parts."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.head(torch.tanh(self.body(x))) * scale  # type: ignore[no-any-return]


def fused(model: Any) -> None:
    """Puts a forward with a loss in place, which without labels is the one that it has found."""
    original = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: Any, x: Tensor, labels: Any = None, **keywords: Any) -> Any:
        if labels is None:
            return original(x, **keywords)
        hidden = torch.tanh(self.body(x))
        return nn.functional.cross_entropy(nn.functional.linear(hidden, self.head.weight), labels)

    model.forward = MethodType(forward, model)


def counted(model: Any) -> list[int]:
    """Puts a forward in place that counts its calls, and goes on to the one that it has found."""
    original, calls = model.forward, []

    def forward(self: Any, *args: Any, **keywords: Any) -> Any:
        calls.append(1)
        return original(*args, **keywords)

    model.forward = MethodType(forward, model)
    return calls


def twins(fallback: Any = "raise") -> tuple[Any, Any]:
    """One in PyTorch, and one with the same parameters as a graph."""
    torch.manual_seed(0)
    plain = Classifier()
    torch.manual_seed(0)
    return plain, ORTModule(Classifier(), options=Options(engine="aten", fallback=fallback))


def step(plain: Any, model: Any, *args: Any, **keywords: Any) -> str:
    """One training step of both, which agree; what the graph's ran on."""
    found = []
    for each in (plain, model):
        each.zero_grad()
        output = each(*args, **keywords)
        output.square().sum().backward()
        gradients = [None if p.grad is None else p.grad.clone() for p in each.parameters()]
        found.append([output.detach(), *gradients])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)
    return model.report.mode  # type: ignore[no-any-return]


def batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 4), torch.randint(0, 3, (rows,))


def test_one_that_takes_the_parts_of_the_module_itself_becomes_its_code() -> None:
    plain, model = twins()
    fused(plain)
    fused(model)
    ran = [step(plain, model, *batch(rows)) for rows in (4, 5, 4)]
    assert ran[1:] == ["graph", "graph"]
    assert model.report.graph_calls == 2
    for _ in range(2):  # without labels it is the forward that was there
        assert step(plain, model, batch(4)[0], scale=2.0) == "graph"
    with torch.no_grad():
        x, labels = batch(6)
        torch.testing.assert_close(plain(x), model(x))
        torch.testing.assert_close(plain(x, labels), model(x, labels))
    assert list(plain.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("order", ["ce", "ec", "ee"])
@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
def test_one_after_the_other_each_does_what_it_does_in_pytorch(order: str) -> None:
    plain, model = twins(fallback="torch")
    counts = []
    for each in (plain, model):
        own = []
        for kind in order:
            own.append(counted(each) if kind == "c" else fused(each))
            if each is model:
                x, labels = batch(3)
                each(*((x, labels) if "e" in order[: len(own)] else (x,))).sum().backward()
        counts.append(own)
    before = [[len(c) for c in own if c is not None] for own in counts]
    for rows in (4, 5, 4):
        step(plain, model, *batch(rows))
        step(plain, model, batch(rows)[0])
    after = [[len(c) for c in own if c is not None] for own in counts]
    gained = [
        [b - a for a, b in zip(*each, strict=True)] for each in zip(before, after, strict=True)
    ]
    assert gained[0] == gained[1]


def test_one_that_goes_on_to_the_graph_stays_around_it() -> None:
    plain, model = twins()
    counts = counted(plain), counted(model)
    assert [step(plain, model, batch(4)[0]) for _ in range(3)] == ["graph"] * 3
    assert [*map(len, counts)] == [3, 3]
    assert "forward" not in vars(model.module)


@pytest.mark.parametrize("way", ["assigned", "deleted"])
def test_the_forward_that_was_there_can_be_put_back(way: str) -> None:
    plain, model = twins()
    originals = plain.forward, model.forward
    for each in (plain, model):
        fused(each)
    for rows in (4, 5):
        step(plain, model, *batch(rows))
    for each, original in zip((plain, model), originals, strict=True):
        if way == "assigned":
            each.forward = original
        else:
            del each.forward
    assert "forward" not in vars(model.module)
    assert step(plain, model, batch(4)[0], scale=3.0) == "graph"
    with pytest.raises(TypeError):
        model(*batch(4), labels=None)


def test_one_that_calls_the_wrapped_module_and_one_that_asks_the_wrapper_go_on_doing_so() -> None:
    plain, model = twins()
    inner = model.module
    model.forward = MethodType(lambda self, x: inner(x) * 2, model)
    x, _ = batch(4)
    for _ in range(3):
        torch.testing.assert_close(model(x), plain(x) * 2)
        model(x).sum().backward()
    _, other = twins()
    other.forward = MethodType(lambda self, x: self.module(x) * 2, other)
    for _ in range(3):
        torch.testing.assert_close(other(x), plain(x) * 2)
        other(x).sum().backward()
    del other  # which holds itself by its forward
    with pytest.warns(OrtrainWarning, match="was never called"):
        gc.collect()


def test_one_that_is_wrapped_in_autocast_stays_so() -> None:
    plain, model = twins()
    for each in (plain, model):
        fused(each)
        # As accelerate does.
        autocast = torch.autocast("cpu", torch.bfloat16)
        each.forward = MethodType(autocast(each.forward.__func__), each)
    x, labels = batch(4)
    for _ in range(3):
        outputs = []
        for each in (plain, model):
            each.zero_grad()
            outputs.append(each(x, labels))
            outputs[-1].backward()
        torch.testing.assert_close(outputs[0], outputs[1], rtol=2e-2, atol=2e-2)
        assert plain(x).dtype == model(x).dtype == torch.bfloat16


def test_what_is_bound_again_as_if_it_were_a_function_of_the_class_is_the_graphs() -> None:
    plain, model = twins()
    found = model.forward
    model.forward = functools.wraps(found)(lambda *args: found(*args))
    model.forward = MethodType(model.forward.__wrapped__, model)
    assert step(plain, model, batch(4)[0]) == "graph"

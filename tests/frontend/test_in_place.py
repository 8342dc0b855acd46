"""``ortrain.compile``: the model stays what it is, and trains as it did."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ortrain
from ortrain.frontend.backend import ortrain as backend


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.norm(self.first(x)))) * scale
        return result

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


def compiled(**options: Any) -> tuple[Model, Model]:
    model = Model()
    eager = copy.deepcopy(model)
    assert ortrain.compile(model, **{"engine": "aten", **options}) is model
    return model, eager


def test_it_trains_as_it_did_and_is_what_it_was() -> None:
    model, eager = compiled()
    for rows in (5, 3, 5):
        x = torch.randn(rows, 4)
        for each in (model, eager):
            each.zero_grad()
            each.loss(x).backward()
        torch.testing.assert_close(
            [p.grad for p in model.parameters()], [p.grad for p in eager.parameters()]
        )
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    assert type(model) is Model
    assert list(model.state_dict()) == list(eager.state_dict())
    report = ortrain.report_of(model)
    assert (report.graph_calls, report.eager_calls) == (3, 0)


def test_hooks_on_the_model_are_called_once() -> None:
    model, eager = compiled()
    seen: list[int] = []
    for each in (model, eager):
        each.register_forward_hook(lambda *given: seen.append(len(seen)) or given[-1] * 2)  # type: ignore[func-returns-value]
    x = torch.randn(3, 4)
    torch.testing.assert_close(model.eval()(x), eager.eval()(x))
    assert len(seen) == 2


def test_copies_and_files_are_of_the_model_as_it_was() -> None:
    model, _ = compiled()
    x = torch.randn(3, 4)
    model(x)
    model.eval()
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(each(x), model(x))
        with pytest.raises(ValueError, match=r"call ortrain\.compile"):
            ortrain.report_of(each)


def test_within_something_else_that_is_compiled_it_is_a_part_of_that() -> None:
    model, eager = compiled()
    outer = nn.Sequential(model, nn.Linear(2, 2))
    graphs: list[Any] = []
    call = torch.compile(outer, backend=lambda g, _: graphs.append(g) or g.forward)  # type: ignore[func-returns-value]
    x = torch.randn(3, 4)
    torch.testing.assert_close(call(x), outer[1](eager(x)))
    assert len(graphs) == 1
    assert ortrain.report_of(model).graph_calls == 0


@pytest.mark.parametrize("engine", ["aten", "auto"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_it_repeats_it(engine: str, reentrant: bool) -> None:
    model, eager = compiled(engine=engine)
    x = torch.randn(3, 4, requires_grad=True)
    for _ in range(2):
        found = []
        for each in (model, eager):
            each.zero_grad()
            output: Any = checkpoint(each, x, use_reentrant=reentrant)
            output.sum().backward()
            found.append([p.grad for p in each.parameters()])
        torch.testing.assert_close(*found)


def test_an_option_that_is_none_is_an_error_and_the_model_is_left() -> None:
    model = Model()
    with pytest.raises(TypeError, match="speed"):
        ortrain.compile(model, speed="high")
    with pytest.raises(ValueError, match="engine="):
        ortrain.compile(model, engine="none")
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        ortrain.compile(torch.tanh)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="was not compiled"):
        ortrain.report_of(model)


def test_it_goes_with_what_it_has_made() -> None:
    model, _ = compiled()
    model.loss(torch.randn(3, 4)).backward()
    gone = [weakref.ref(model), weakref.ref(model.first.weight)]
    del model
    gc.collect()
    assert [each() for each in gone] == [None, None]


@pytest.mark.parametrize("name", ["ortrain", "onnxrt"])
def test_trainers_that_take_a_name_find_the_backend(name: str) -> None:
    from torch._dynamo.backends.registry import lookup_backend

    assert lookup_backend(name) is backend

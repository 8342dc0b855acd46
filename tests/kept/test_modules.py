"""Sub-modules that stay PyTorch's: those that are named, and those whose code capture refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from ortrain.errors import InputError
from tests.kept.twins import Twins

ENGINES = ["aten", "onnxruntime"]


class Inner(nn.Module):
    """A linear layer and a parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(8, 8), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.linear(x))


class Counting(Inner):
    """Counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return super().forward(x) * 0.5


class Remembering(Inner):
    """Puts what it computes into an attribute, a list and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: Any = None
        self.counts: list[int] = []
        self.norms: dict[str, float] = {}

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        self.memory = y.detach()
        self.counts.append(x.shape[0])
        self.norms["last"] = float(y.detach().norm())
        return y


class Valued(Inner):
    """Turns the value of a tensor into the size of a loop."""

    def forward(self, x: Tensor) -> Any:
        y = x
        for _ in range(int(x.detach().abs().mean().item() * 3) + 1):
            y = torch.tanh(self.linear(y))
        return y


class Selecting(Inner):
    """Computes on rows that values select, and puts them back."""

    def forward(self, x: Tensor) -> Any:
        chosen = (x.sum(-1) > 0).nonzero()[:, 0].tolist()
        y = x * 0.1
        for i in chosen:
            y = torch.cat([y[:i], self.linear(x[i : i + 1]), y[i + 1 :]])
        return y


class WithNumpy(Inner):
    """Leaves PyTorch on the way."""

    def forward(self, x: Tensor) -> Any:
        scale = np.tanh(x.detach().numpy()).astype(np.float32)
        return self.linear(x) * torch.from_numpy(scale)


class WithBuffers(Inner):
    """Normalizes a batch, writes a buffer in place, and assigns another."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.seen.add_(x.detach().sum(0))
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.norm(self.linear(x)) + self.mean


class Dropping(Inner):
    """Drops elements, by PyTorch's generator."""

    def forward(self, x: Tensor) -> Any:
        return nn.functional.dropout(self.linear(x), 0.5, self.training)


class Recurrent(Inner):
    """Has weights in a list of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8)

    def forward(self, x: Tensor) -> Any:
        y, _ = self.lstm(x)
        return y


class Several(Inner):
    """Takes and gives a structure, with None and a number in it."""

    def forward(self, x: Tensor, more: Any = None) -> Any:
        y = super().forward(x + more["tensor"] * more["factor"])
        return {"y": y, "none": None, "pair": (y.sum(-1), 3)}


class Twice(nn.Module):
    """Calls one module twice, of tied weights, and another one with a structure."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), inner, nn.Linear(8, 3)
        self.other = Several()
        self.other.linear = inner.linear

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(torch.relu(self.first(x)))
        h = self.inner(h) + h
        found = self.other(h, more={"tensor": x, "factor": 0.5})
        result: Tensor = self.last(found["y"]) * found["pair"][0].unsqueeze(-1) / found["pair"][1]
        return result


NAMED: dict[str, Any] = {
    kind.__name__: kind
    for kind in (Inner, Counting, Remembering, Valued, Selecting, WithNumpy, WithBuffers, Dropping,
                 Recurrent)
}  # fmt: skip
REFUSED = [Counting, Remembering, Valued, Selecting, WithNumpy]


def an_input(rows: int) -> Tensor:
    return torch.randn(rows, 8, requires_grad=True)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", NAMED)
def test_a_named_module_gives_what_pytorch_gives(kind: str, engine: str) -> None:
    twins = Twins(Twice(NAMED[kind]()), engine, keep_in_torch=["inner", "oth*"])
    for rows in (5, 3, 5):
        twins.step(an_input(rows))
    for model in (twins.eager, twins.graph):
        model.eval()
    twins.step(an_input(4), grad=False)
    twins.step(an_input(5))
    assert twins.graph.report.captures <= 4


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", REFUSED)
def test_a_module_whose_code_is_refused_is_kept_alone(kind: Any, engine: str) -> None:
    twins = Twins(Twice(kind()), engine)
    for rows in (5, 3, 5, 6):
        twins.step(an_input(rows))
    assert twins.graph.report.graph_calls == 4


@pytest.mark.parametrize("kind", [Counting, Remembering])
def test_what_a_kept_module_holds_is_its_own_and_no_state_of_a_capture(kind: Any) -> None:
    twins = Twins(Twice(kind()), "aten")
    for rows in (5, 3, 5, 6):
        twins.step(an_input(rows))
    eager, graph = twins.eager.inner, twins.module.inner
    assert twins.graph.report.captures == 1
    for name, value in vars(eager).items():
        if name in ("calls", "counts", "norms"):
            assert getattr(graph, name) == pytest.approx(value), name
    if kind is Remembering:
        assert torch.equal(eager.memory, graph.memory)


class Deep(nn.Module):
    """Layers of which some are refused."""

    def __init__(self, layers: int, refused: int) -> None:
        super().__init__()
        kinds = [Counting if i < refused else Inner for i in range(layers)]
        self.layers = nn.ModuleList([kind() for kind in kinds])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_several_modules_may_be_refused() -> None:
    twins = Twins(Deep(4, 3), "aten")
    twins.step(an_input(5))


def test_more_than_eight_refused_modules_are_left_to_pytorch_with_the_whole() -> None:
    model = ORTModule(Deep(10, 9), options=Options(engine="aten"))
    with pytest.warns(UserWarning, match="runs Deep in PyTorch"):
        model(an_input(5))
    assert model.report.graph_calls == 0


class SelfCounting(nn.Module):
    """Counts its calls itself: no sub-module is around that."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.inner(x)


def test_what_the_module_itself_does_is_refused_as_ever() -> None:
    model = ORTModule(SelfCounting(), options=Options(engine="aten"))
    with pytest.warns(UserWarning, match="runs SelfCounting in PyTorch"):
        model(an_input(5))


@pytest.mark.parametrize("pattern", ["inner.liner", "encoder.*", "Inner", "inner."])
def test_a_name_that_matches_nothing_names_those_near_it(pattern: str) -> None:
    with pytest.raises(InputError, match=r"is no sub-module of Twice\n.*\n?.*'inner"):
        ORTModule(Twice(Inner()), options=Options(keep_in_torch=[pattern]))


@pytest.mark.parametrize("names", ["inner", [3], None])
def test_names_are_a_list_of_strings(names: Any) -> None:
    with pytest.raises(TypeError, match="keep_in_torch"):
        Options(keep_in_torch=names)


def test_a_frozen_parameter_of_a_kept_module_gets_no_gradient_and_thaws() -> None:
    twins = Twins(Twice(Inner()), "aten", keep_in_torch=["inner"])
    for frozen in (True, False, True):
        for model in (twins.eager, twins.module):
            model.inner.linear.weight.requires_grad_(not frozen)
        twins.step(an_input(5))


def test_an_optimizer_moves_the_parameters_of_a_kept_module() -> None:
    twins = Twins(Twice(WithBuffers()), "aten", keep_in_torch=["inner"])
    optimizers = [
        torch.optim.AdamW(model.parameters(), 0.01) for model in (twins.eager, twins.module)
    ]
    x = an_input(6).detach()
    for _ in range(4):
        for model, optimizer in zip((twins.eager, twins.graph), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(twins.eager.parameters(), twins.module.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_kept_module_that_is_replaced_is_captured_anew() -> None:
    twins = Twins(Twice(Inner()), "aten", keep_in_torch=["inner"])
    twins.step(an_input(5))
    torch.manual_seed(1)
    twins.eager.inner.linear = nn.Linear(8, 8)
    torch.manual_seed(1)
    twins.module.inner.linear = nn.Linear(8, 8)
    twins.step(an_input(5))


def test_a_refused_module_that_is_replaced_is_taken_apart() -> None:
    twins = Twins(Twice(Counting()), "aten")
    twins.step(an_input(5))
    torch.manual_seed(1)
    twins.eager.inner = Inner()
    torch.manual_seed(1)
    twins.module.inner = Inner()
    twins.step(an_input(5))


def test_a_named_module_that_is_gone_is_none() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.adapter = nn.Linear(8, 8), Inner()

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.first(x))
            return h if self.adapter is None else self.adapter(h)

    twins = Twins(Optional(), "aten", keep_in_torch=["adapter"])
    twins.step(an_input(5))
    for model in (twins.eager, twins.module):
        model.adapter = None
    twins.step(an_input(5))


def test_auto_runs_a_module_of_which_a_part_is_refused() -> None:
    module = Twice(Counting())
    model = ORTModule(module, options=Options())
    for _ in range(12):
        model(an_input(5)).sum().backward()
    assert module.inner.calls == 24
    assert "Counting" not in model.report.reason

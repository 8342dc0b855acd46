"""A graph that fails in a backward, at any step: PyTorch answers, from the same values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from ortrain.errors import ExecutionError, NoGradientRule, OrtrainWarning
from ortrain.runtime.onnxruntime import Compiled
from tests.module.agreement import GRAPH

FALLS_BACK = Options(engine="onnxruntime")


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Small(nn.Module):
    """With buffers that are updated, and two outputs."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8)
        self.dropout, self.head = nn.Dropout(p), nn.Linear(8, 2)

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.dropout(self.norm(self.body(value)).tanh())
        return self.head(hidden), hidden


class Faults:
    """Fails chosen runs of the graphs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None
        own = Compiled.run_values

        def run_values(compiled: Compiled, feeds: Any) -> Any:
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    self.left = None
                    raise ExecutionError("onnxruntime failed to run the graph", because="no memory")
            return own(compiled, feeds)

        monkeypatch.setattr(Compiled, "run_values", run_values)

    def after(self, runs: int) -> None:
        """Lets so many runs pass, and fails the next."""
        self.left = runs


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


def loss_of(outputs: tuple[Tensor, Tensor], heads: str = "ab") -> Tensor:
    return sum(o.pow(3).mean() for o, name in zip(outputs, "ab", strict=True) if name in heads)  # type: ignore[return-value]


def assert_alike(ours: nn.Module, eager: nn.Module) -> None:
    theirs = dict(eager.named_parameters())
    for name, parameter in ours.named_parameters():
        expected = theirs[name].grad
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-7, msg=name)
    known = dict(eager.named_buffers())
    for name, buffer in ours.named_buffers():
        torch.testing.assert_close(buffer, known[name], msg=name)


@pytest.mark.parametrize("at", [0, 1, 7])
@pytest.mark.parametrize("heads", ["ab", "b"])
def test_a_backward_that_fails_at_any_step_is_pytorchs(faults: Faults, at: int, heads: str) -> None:
    eager = Small()
    model = ORTModule(copy.deepcopy(eager), options=FALLS_BACK)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, eager)]
    for number in range(10):
        for each, optimizer in zip((model, eager), optimizers, strict=True):
            value = rows(6, 4, seed=number).requires_grad_()
            optimizer.zero_grad()
            outputs = each(value)
            if each is model and number == at:
                faults.after(0)
                with pytest.warns(OrtrainWarning, match="no memory"):
                    loss_of(outputs, heads).backward()
            else:
                loss_of(outputs, heads).backward()
            gradient = value.grad
            if each is model:
                ours = gradient
        torch.testing.assert_close(ours, gradient)
        assert_alike(model, eager)
        for optimizer in optimizers:
            optimizer.step()
    assert model.report.recovered == 1
    assert "recovered" in str(model.report)
    assert model.report.mode == "eager"
    assert "no memory" in model.report.reason
    assert model.report.graph_calls == at + 1


def test_with_retry_the_graph_goes_on_after_it(faults: Faults) -> None:
    eager = Small()
    model = ORTModule(copy.deepcopy(eager), options=Options(engine="onnxruntime", retry=True))
    for number in range(6):
        for each in (model, eager):
            each.zero_grad()
            outputs = each(rows(6, 4, seed=number))
            if each is model and number in (2, 4):
                faults.after(0)
            if each is model and number == 2:
                with pytest.warns(OrtrainWarning, match="no memory"):
                    loss_of(outputs).backward()
            else:
                loss_of(outputs).backward()
        assert_alike(model, eager)
    assert (model.report.recovered, model.report.graph_calls) == (2, 6)


def test_other_sizes_go_on_as_a_graph(faults: Faults) -> None:
    model = ORTModule(Small(), options=FALLS_BACK)
    loss_of(model(rows(5, 4))).backward()
    outputs = model(rows(6, 4))
    faults.after(0)
    with pytest.warns(OrtrainWarning):
        loss_of(outputs).backward()
    loss_of(model(rows(5, 4))).backward()
    assert model.report.mode == "graph"
    loss_of(model(rows(6, 4))).backward()
    assert model.report.mode == "eager"


def test_masks_are_those_of_the_forward(faults: Faults) -> None:
    model = ORTModule(Small(0.5), options=FALLS_BACK)
    found = []
    for fails in (False, True):
        torch.manual_seed(3)
        model.zero_grad()
        outputs = model(rows(6, 4))
        torch.rand(5)
        state = torch.get_rng_state()
        if fails:
            faults.after(0)
            with pytest.warns(OrtrainWarning):
                loss_of(outputs).backward()
            assert torch.equal(torch.get_rng_state(), state)
        else:
            loss_of(outputs).backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-7)


def test_it_is_raised_where_no_fallback_is_allowed(faults: Faults) -> None:
    model = ORTModule(Small(), options=GRAPH)
    outputs = model(rows(6, 4))
    faults.after(0)
    with pytest.raises(ExecutionError, match="no memory"):
        loss_of(outputs).backward()
    assert model.report.recovered == 0


def test_an_error_that_nobody_foresaw_is_answered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = Small()
    model = ORTModule(copy.deepcopy(eager), options=FALLS_BACK)
    outputs = model(rows(6, 4))

    def failing(self: Compiled, feeds: Any) -> Any:
        raise MemoryError("12 GiB")

    with monkeypatch.context() as patched:
        patched.setattr(Compiled, "run_values", failing)
        with pytest.warns(OrtrainWarning, match="MemoryError: 12"):
            loss_of(outputs).backward()
    loss_of(eager(rows(6, 4))).backward()
    assert_alike(model, eager)


def test_a_graph_for_other_gradients_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = Small()
    model = ORTModule(copy.deepcopy(eager), options=FALLS_BACK)
    loss_of(model(rows(6, 4))).backward()
    model.zero_grad()

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise NoGradientRule("no gradient rule for 'Det'")

    outputs = model(rows(6, 4, seed=1))
    with monkeypatch.context() as patched:
        patched.setattr("ortrain.frontend.form.build", failing)
        with pytest.warns(OrtrainWarning, match="Det"):
            loss_of(outputs, "b").backward()
    eager(rows(6, 4))
    loss_of(eager(rows(6, 4, seed=1)), "b").backward()
    assert_alike(model, eager)


@pytest.mark.parametrize("kept", [False, True])
def test_a_kept_graph_may_fail_at_its_second_backward(faults: Faults, kept: bool) -> None:
    eager = Small()
    model = ORTModule(copy.deepcopy(eager), options=FALLS_BACK)
    for each in (model, eager):
        loss = loss_of(each(rows(6, 4)))
        loss.backward(retain_graph=True)
        if each is model:
            faults.after(0)
            with pytest.warns(OrtrainWarning):
                loss.backward(retain_graph=kept)
        else:
            loss.backward(retain_graph=kept)
        if kept:
            loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    assert_alike(model, eager)


def test_pytorch_answers_for_a_module_as_it_was_in_the_forward(faults: Faults) -> None:
    eager = Small()
    model = ORTModule(copy.deepcopy(eager), options=FALLS_BACK)
    outputs = model(rows(6, 4))
    model.module.register_forward_hook(lambda *_: None)
    faults.after(0)
    with pytest.warns(OrtrainWarning, match="no memory"):
        loss_of(outputs).backward()
    loss_of(eager(rows(6, 4))).backward()
    assert_alike(model, eager)


def test_a_forward_that_fails_is_pytorchs_at_any_step(faults: Faults) -> None:
    eager = Small()
    model = ORTModule(copy.deepcopy(eager), options=FALLS_BACK)
    for number in range(4):
        for each in (model, eager):
            each.zero_grad()
            if each is model and number == 2:
                faults.after(0)
                with pytest.warns(OrtrainWarning, match="no memory"):
                    outputs = each(rows(6, 4, seed=number))
            else:
                outputs = each(rows(6, 4, seed=number))
            loss_of(outputs).backward()
        assert_alike(model, eager)

"""Calls of other sizes: one capture where the module's code allows, else another one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from ortrain.errors import CaptureError, OrtrainWarning
from tests.module.agreement import GRAPH, SAME


class Applies(nn.Module):
    """A linear layer, and a function after it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function
        self.eager_calls: list[int] = []

    def forward(self, value: Tensor) -> Tensor:
        return self.function(self.layer(value))


def assert_same_step(model: nn.Module, eager: nn.Module, value: Tensor) -> None:
    """Raises unless outputs and gradients agree."""
    outputs = []
    for each in (model, eager):
        each.zero_grad()
        output = each(value)
        output.pow(2).sum().backward()
        outputs.append(output)
    torch.testing.assert_close(*outputs, rtol=SAME, atol=SAME)
    for mine, its in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=SAME, atol=SAME)


def pair(module: nn.Module, options: Options = GRAPH) -> tuple[ORTModule, nn.Module]:
    return ORTModule(copy.deepcopy(module), options=options), module


def _branch(value: Tensor) -> Tensor:
    return value * 2 if value.shape[0] == 1 else value * 3


def _squeezed(value: Tensor) -> Tensor:
    return value.squeeze(0)


def _broadcast(value: Tensor) -> Tensor:
    return value - value[:1].expand(value.shape[0], -1).flip(0)


def _mean_of_the_rest(value: Tensor) -> Tensor:
    return value[1:].mean(0, keepdim=True) if value.shape[0] > 1 else value


SPECIAL_AT_ONE = [_branch, _squeezed, _mean_of_the_rest]


@pytest.mark.parametrize("function", SPECIAL_AT_ONE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("sizes", [(3, 1, 2, 1, 5), (1, 3, 1, 2)], ids=str)
def test_code_that_treats_a_size_of_one_apart_is_followed(
    function: Callable[[Tensor], Tensor], sizes: tuple[int, ...]
) -> None:
    model, eager = pair(Applies(function))
    for size in sizes:
        assert_same_step(model, eager, torch.randn(size, 4))
    assert model.report.captures == 2
    assert model.report.mode == "graph"


@pytest.mark.parametrize(("sizes", "captures"), [((3, 1, 2, 1), 1), ((1, 3, 1), 2)], ids=str)
def test_a_graph_of_any_size_serves_one_too_and_that_of_a_first_one_no_other(
    sizes: tuple[int, ...], captures: int
) -> None:
    model, eager = pair(Applies(_broadcast))
    for size in sizes:
        assert_same_step(model, eager, torch.randn(size, 4))
    assert model.report.captures == captures


class Appends(nn.Module):
    """To a past of any length, which capture does not know for a length: it has four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, past: Tensor, mask: Tensor) -> Tensor:
        both = torch.cat([past, self.layer(past[:, :, -1:])], 2)
        return both * mask[:, None, :, None]


def test_a_past_of_one_and_one_of_any_length_are_two_graphs() -> None:
    model, eager = pair(Appends())
    for length in (1, 2, 4, 1):
        inputs = torch.randn(2, 3, length, 4), torch.ones(2, length + 1)
        torch.testing.assert_close(model(*inputs), eager(*inputs), rtol=SAME, atol=SAME)
    assert (model.report.captures, model.report.mode) == (2, "graph")


class Watched(nn.Module):
    """Tells a list outside of it about every forward that really runs."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.note = seen.append

    def forward(self, value: Tensor) -> Tensor:
        if type(value) is Tensor:
            self.note(tuple(value.shape))
        result: Tensor = self.drop(self.norm(self.layer(value)))
        return result


def test_a_comparison_at_a_size_of_one_leaves_no_trace() -> None:
    seen: list[Any] = []
    model = ORTModule(Watched(seen), options=GRAPH)
    model(torch.randn(5, 3, 4).flatten(0, 1))
    model.norm.eval()  # which refuses a single row in training, as the next test shows
    buffers = copy.deepcopy(dict(model.named_buffers()))
    model(torch.randn(5, 4))
    seen.clear()
    state = torch.get_rng_state()
    model(torch.randn(1, 4))
    drawn = torch.get_rng_state()
    assert seen == [(1, 4)]
    torch.set_rng_state(state)
    model(torch.randn(1, 4))
    assert seen == [(1, 4), (1, 4)], "once a call"
    assert torch.equal(torch.get_rng_state(), drawn), "the comparison drew nothing"
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name])


def test_what_the_module_refuses_at_one_it_refuses_as_a_graph() -> None:
    model, eager = pair(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    assert_same_step(model, eager, torch.randn(3, 4))
    for each in (model, eager, model):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            each(torch.randn(1, 4))
    assert_same_step(model, eager, torch.randn(3, 4))
    assert model.report.mode == "graph"
    assert model.report.captures == 1


def test_two_axes_of_one_are_two_patterns() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, value: Tensor) -> Tensor:
            hidden: Tensor = self.layer(value)
            if value.shape[0] == 1:
                hidden = hidden * 2
            return hidden * 3 if value.shape[1] == 1 else hidden

    model, eager = pair(Both())
    for batch in (3, 1, 2):
        for length in (5, 1, 2):
            assert_same_step(model, eager, torch.randn(batch, length, 4))
    assert model.report.mode == "graph"
    assert model.report.captures == 4


class Loops(nn.Module):
    """Its code unrolls over the length."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        state = torch.zeros(value.shape[0], 4)
        for step in range(value.shape[1]):
            state = torch.tanh(self.layer(value[:, step]) + state)
        return state


def test_lengths_that_the_code_unrolls_are_captured_each() -> None:
    model, eager = pair(Loops())
    for batch, length in ((2, 3), (4, 3), (2, 2), (3, 2), (5, 3)):
        assert_same_step(model, eager, torch.randn(batch, length, 4))
    assert model.report.captures == 2


def test_too_many_lengths_run_eagerly_and_the_captured_ones_as_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ortrain.pytorch.dynamo.MOST", 4)
    model, eager = pair(Loops(), Options(engine="onnxruntime"))
    for length in range(2, 6):
        assert_same_step(model, eager, torch.randn(2, length, 4))
        assert model.report.mode == "graph"
    with pytest.warns(OrtrainWarning, match="in PyTorch"):
        assert_same_step(model, eager, torch.randn(2, 30, 4))
    assert model.report.mode == "eager"
    assert_same_step(model, eager, torch.randn(2, 2, 4))
    assert model.report.mode == "graph"
    assert model.report.captures == 4


def test_an_empty_batch_gives_what_eager_gives() -> None:
    model, eager = pair(Applies(torch.tanh), Options(engine="onnxruntime"))
    assert_same_step(model, eager, torch.randn(3, 4))
    assert_same_step(model, eager, torch.randn(0, 4))
    assert_same_step(model, eager, torch.randn(2, 4))


def test_a_size_that_the_data_decides_needs_one_capture() -> None:
    graph, eager = pair(Applies(lambda value: value[value[:, 0] > 0].softmax(0)))
    for rows in (5, 9, 2, 5):
        assert_same_step(graph, eager, torch.randn(rows, 4))
    assert graph.report.captures == 1


def test_another_rank_is_another_capture() -> None:
    model, eager = pair(Applies(torch.tanh))
    for shape in ((3, 4), (2, 3, 4), (4,), (5, 4)):
        assert_same_step(model, eager, torch.randn(shape))
    assert model.report.captures == 3


# --- calls that fail ----------------------------------------------------------------------------


class Choosy(nn.Module):
    """Is a graph without ``turn`` only, and refuses other counts of features."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, value: Tensor, *, turn: bool = False) -> Tensor:
        if value.shape[-1] != 4:
            raise ValueError(f"this module takes 4 features, not {value.shape[-1]}")
        hidden: Tensor = self.layer(value)
        return (hidden * 1j).abs() if turn else hidden


def test_a_form_that_cannot_be_captured_leaves_the_others_alone() -> None:
    model, eager = pair(Choosy(), Options(engine="onnxruntime"))
    value = torch.randn(3, 4)
    with pytest.warns(OrtrainWarning, match="is complex"):
        torch.testing.assert_close(model(value, turn=True), eager(value, turn=True))
    assert model.report.mode == "eager"
    for _ in range(2):
        assert_same_step(model, eager, value)
        assert model.report.mode == "graph"
        torch.testing.assert_close(model(value, turn=True), eager(value, turn=True))
        assert model.report.mode == "eager"


def test_a_form_that_cannot_be_captured_raises_each_time_where_no_fallback_is_allowed() -> None:
    model, eager = pair(Choosy())
    for _ in range(2):
        with pytest.raises(CaptureError, match="is complex"):
            model(torch.randn(3, 4), turn=True)
        assert_same_step(model, eager, torch.randn(3, 4))


@pytest.mark.parametrize("first", [True, False], ids=["at first", "later"])
def test_an_error_of_the_module_is_the_modules_and_changes_nothing(first: bool) -> None:
    model, eager = pair(Choosy(), Options(engine="onnxruntime"))
    if not first:
        assert_same_step(model, eager, torch.randn(3, 4))
    state = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(ValueError, match="takes 4 features, not 5"):
            model(torch.randn(3, 5))
    assert not torch.equal(state, torch.get_rng_state()), "the inputs of this test"
    assert_same_step(model, eager, torch.randn(3, 4))
    assert model.report.mode == "graph"
    assert model.report.reason == ""
    assert model.report.captures == 1 + (not first)  # Dynamo begins anew behind an error


def test_an_index_out_of_range_is_eagers_error_and_changes_nothing() -> None:
    model, eager = pair(nn.Embedding(5, 4), Options(engine="onnxruntime"))
    good = torch.tensor([0, 4, 2])
    assert_same_step(model, eager, good)
    with pytest.raises(IndexError, match="out of range"):
        model(torch.tensor([0, 5, 2]))
    assert_same_step(model, eager, good)
    assert model.report.mode == "graph"
    assert model.report.captures == 1


def test_an_error_in_the_middle_leaves_buffers_as_eager_does() -> None:
    class Stops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.layer = nn.Linear(4, 4)

        def forward(self, value: Tensor, stop: bool = False) -> Tensor:
            value = self.norm(value)
            if stop:
                raise RuntimeError("stopped")
            result: Tensor = self.layer(value)
            return result

    model, eager = pair(Stops(), Options(engine="onnxruntime"))
    assert_same_step(model, eager, torch.randn(3, 4))
    value = torch.randn(3, 4)
    for each in (model, eager):
        with pytest.raises(RuntimeError, match="stopped"):
            each(value, stop=True)
    for mine, its in zip(model.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(mine, its)
    assert_same_step(model, eager, torch.randn(3, 4))
    assert model.report.mode == "graph"

"""How many elements a mask selects is a size that no input has: any number gives eager's results.

Code takes the selected rows through an operator, or asks how many there are. Whatever the trace
has taken for granted is checked, and a call with another number of them runs in PyTorch.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from ortrain.errors import CaptureError, OrtrainWarning
from ortrain.frontend.export import export
from tests.module.selecting import GRAPHS, Function

MASKS = ("110110", "111111", "100000", "000000", "011010", "000001", "111000", "010010")


class Selects(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(3, 3, dtype=torch.float64), function

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.function(self.layer(x), mask)


def outcome(module: nn.Module, x: Tensor, mask: Tensor) -> list[Tensor]:
    """What a call returns and its gradients; nothing where it raises."""
    module.zero_grad()
    try:
        output = module(x, mask)
    except Exception:
        return []
    output.square().sum().backward()
    return [output.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


@pytest.mark.filterwarnings("ignore")  # of a call that goes another way, and of eager's own
@pytest.mark.parametrize("name", GRAPHS)
def test_any_number_of_selected_rows_has_eagers_results(name: str) -> None:
    eager = Selects(GRAPHS[name])
    model = ORTModule(copy.deepcopy(eager), options=Options(engine="onnxruntime"))
    for rows in (6, 9):
        for mask in MASKS:
            x = torch.randn(rows, 3, dtype=torch.float64)
            selected = torch.tensor([c == "1" for c in mask] + [True, False, True][: rows - 6])
            ours, theirs = (outcome(m, x, selected) for m in (model, eager))
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8, equal_nan=True)
    asks = name == "raises for none"  # for a number that is in a tensor, where Dynamo has a symbol
    assert bool(model.report.graph_calls) is not asks, model.report.reason


def _more_than_five(y: Tensor, m: Tensor) -> Tensor:
    rows = y[m]
    return rows * 2 if rows.shape[0] > 5 else rows


class Asks(Selects):
    """The question is its own, and not that of a function which could stay PyTorch's."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows = self.layer(x)[mask]
        return rows * 2 if rows.shape[0] > 5 else rows


def _agrees(model: nn.Module, eager: nn.Module) -> None:
    for mask in MASKS[:3]:
        x = torch.randn(6, 3, dtype=torch.float64)
        selected = torch.tensor([c == "1" for c in mask])
        torch.testing.assert_close(model(x, selected), eager(x, selected))


@pytest.mark.parametrize("engine", ["onnxruntime", "aten"])
def test_a_question_on_which_sizes_do_not_agree_stands_between_graphs(engine: Any) -> None:
    eager = Asks(_more_than_five)
    model = ORTModule(copy.deepcopy(eager), options=Options(engine=engine, fallback="raise"))
    _agrees(model, eager)
    assert model.report.graph_calls == 3


@pytest.mark.parametrize("engine", ["onnxruntime", "aten"])
def test_nothing_is_right_for_a_mask_that_only_copies(engine: Any) -> None:
    """Splines copy what lies outside of an interval, mostly nothing, and compute the rest."""
    eager = Selects(GRAPHS["each written its way"])
    model = ORTModule(copy.deepcopy(eager), options=Options(engine=engine))
    for mask in ("111111", "111111", "110110", "111111", "100000"):
        x, selected = torch.randn(6, 3, dtype=torch.float64), torch.tensor([c == "1" for c in mask])
        ours, theirs = (outcome(m, x, selected) for m in (model, eager))
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)
    assert (model.report.graph_calls, model.report.astray) == (5, 0)
    x, nothing = torch.randn(6, 3, dtype=torch.float64), torch.zeros(6, dtype=torch.bool)
    torch.testing.assert_close(outcome(model, x, nothing), outcome(eager, x, nothing))
    assert model.report.astray == 1  # of nothing there is no cumulative sum


class Recurrent(Selects):
    """Kernels that end the process when they are given nothing."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(lambda y, m: y)
        self.recurrent = layer

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        output: Tensor = self.recurrent(self.layer(x)[mask][:, None])[0]
        return output


@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM, nn.RNN])
def test_a_recurrent_layer_is_never_given_nothing(layer: Any) -> None:
    eager = Recurrent(layer(3, 3, batch_first=True, dtype=torch.float32)).float()
    model = ORTModule(copy.deepcopy(eager), options=Options(engine="onnxruntime"))
    for mask in MASKS:
        x, selected = torch.randn(6, 3), torch.tensor([c == "1" for c in mask])
        for mine, own in zip(*(outcome(m, x, selected) for m in (model, eager)), strict=True):
            torch.testing.assert_close(mine, own, rtol=1e-4, atol=1e-5)
    assert model.report.graph_calls > model.report.astray > 0


def test_what_may_be_given_nothing_by_a_number_is_eagers() -> None:
    eager = Selects(lambda y, m: y[: m.sum()].flip(0))
    model = ORTModule(copy.deepcopy(eager), options=Options(engine="onnxruntime"))
    x, selected = torch.randn(6, 3, dtype=torch.float64), torch.ones(6, dtype=torch.bool)
    with pytest.warns(OrtrainWarning, match="flip may be given nothing"):
        torch.testing.assert_close(model(x, selected), eager(x, selected))


def test_a_program_whose_checks_nobody_looks_at_takes_nothing_for_granted() -> None:
    x, mask = torch.randn(6, 3, dtype=torch.float64), torch.ones(6, dtype=torch.bool)
    with pytest.raises(CaptureError, match="a dimension is squeezed whose size values decide"):
        export(Selects(GRAPHS["squeeze"]), (x, mask))
    with pytest.raises(CaptureError, match="sizes of the inputs alone do not tell"):
        export(Selects(GRAPHS["two masks"]), (x, mask))
    program = export(Selects(GRAPHS["tiled"]), (x, mask)).program
    assert "Or" not in program.operators()


@pytest.mark.parametrize("name", ["returns early", "adds if any", "first", "squeeze", "two masks"])
def test_a_graph_is_not_ruled_out_at_the_first_call(name: str) -> None:
    model = ORTModule(Selects(GRAPHS[name]))
    for mask in MASKS[:1] * 6:  # a warning would be an error
        selected = torch.tensor([c == "1" for c in (mask if name != "two masks" else "111000")])
        outcome(model, torch.randn(6, 3, dtype=torch.float64), selected)
    assert "contest" in model.report.reason


@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
@pytest.mark.parametrize("seed", range(3))
def test_an_adaptive_softmax_is_eagers_with_any_targets(seed: int) -> None:
    class Adaptive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.softmax = nn.AdaptiveLogSoftmaxWithLoss(3, 20, [5, 12], div_value=1.0)

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            output: Tensor = self.softmax(x, targets)
            return output[0]

    torch.manual_seed(seed)
    eager = Adaptive()
    model = ORTModule(copy.deepcopy(eager), options=Options(engine="onnxruntime"))
    for rows, classes in ((40, 20), (8, 20), (1, 20), (40, 20), (6, 12), (3, 5), (40, 20)):
        x, targets = torch.randn(rows, 3), torch.randint(0, classes, (rows,))
        for mine, own in zip(*(outcome(m, x, targets) for m in (model, eager)), strict=True):
            torch.testing.assert_close(mine, own, rtol=1e-4, atol=1e-5)


class Experts(nn.Module):
    """A loop over experts, each of which gets the rows that chose it: some, one or none."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(3, 6)
        layers = [nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 3)) for _ in range(6)]
        self.experts = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == number)
            output.index_add_(0, rows, expert(x[rows]) * weights[rows, slots, None])
        return output


def test_experts_in_a_loop_may_get_nothing_and_stay_a_graph() -> None:
    torch.manual_seed(0)
    eager = Experts()
    model = ORTModule(copy.deepcopy(eager), options=Options(engine="onnxruntime"))
    for rows in (64, 5, 3, 2, 64):
        x = torch.randn(rows, 3)
        for each in (eager, model):
            each.zero_grad()
            each(x).square().sum().backward()
        for mine, own in zip(model.module.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, own.grad, rtol=1e-4, atol=1e-6)
    assert model.report.graph_calls == 5
    assert model.report.astray == 0


@pytest.mark.parametrize("rows", [1, 6])
def test_a_first_call_that_the_graph_does_not_hold_for_rules_nothing_out(rows: int) -> None:
    eager = Selects(lambda y, m: y[: m.sum()] + (y * 0).sort(1).values[:1])  # of equals
    model = ORTModule(copy.deepcopy(eager))
    x, selected = torch.randn(rows, 3, dtype=torch.float64), torch.ones(rows, dtype=torch.bool)
    torch.testing.assert_close(model(x, selected), eager(x, selected))
    assert "contest" in model.report.reason

"""What is around kept calls: memory budgets, checkpoints, padding, checks, caches and reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ortrain import DebugOptions, Options, ORTModule, explain
from ortrain.capture.export import capture
from ortrain.errors import CaptureError, ExecutionError
from ortrain.kept.call import kept
from ortrain.ops.kept import is_kept
from tests.kept.functions import KINDS
from tests.kept.twins import Twins


class Counting(nn.Module):
    """Counts its runs, as no graph does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        result: Tensor = torch.tanh(self.linear(x))
        return result


class Stack(nn.Module):
    """Layers around a sub-module, in a checkpoint where that is asked for."""

    def __init__(self, inner: nn.Module, checkpointed: bool = False) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 64), inner, nn.Linear(8, 3)
        self.second, self.checkpointed = nn.Linear(64, 8), checkpointed

    def between(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(torch.relu(self.second(torch.relu(self.first(x)))))
        return result

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            x = checkpoint(self.between, x, use_reentrant=False)  # type: ignore[assignment]
        else:
            x = self.between(x)
        result: Tensor = self.last(torch.relu(x))
        return result


def an_input(rows: int) -> Tensor:
    return torch.randn(rows, 8, requires_grad=True)


def test_a_memory_budget_runs_no_kept_call_again() -> None:
    twins = Twins(Stack(Counting()), "aten", memory_budget="least")
    for rows in (50, 30):
        twins.step(an_input(rows))
    assert twins.module.inner.runs == twins.eager.inner.runs == 2
    plan = _plan(twins)
    for program in plan.programs[1:]:
        assert not [n for n in program.graph if is_kept(n) and n.op_type == "Kept"]


def _plan(twins: Twins) -> Any:
    runner: Any = twins.graph._runner
    return runner.compiler.plan


def test_a_checkpoint_runs_no_kept_call_again() -> None:
    twins = Twins(Stack(Counting(), checkpointed=True), "aten")
    for rows in (5, 3):
        twins.step(an_input(rows))
    assert twins.module.inner.runs == 2
    assert twins.kept


class Checked(nn.Module):
    """Raises where values are large, behind a sub-module that has effects."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.inner = nn.Linear(8, 8), nn.BatchNorm1d(8), Counting()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.norm(self.first(x)))
        if (x > 50).any():
            y = y * 2
        return y


def test_what_a_kept_module_did_before_a_check_failed_is_undone() -> None:
    twins = Twins(Checked(), "aten", keep_in_torch=["norm", "inner"])
    for largest in (1, 100, 1, 100):
        x = an_input(5)
        with torch.no_grad():
            x[0, 0] = largest
        twins.step(x)
    assert twins.graph.report.astray == 2
    assert twins.module.inner.runs == twins.eager.inner.runs == 4


def test_programs_with_kept_calls_are_not_cached(tmp_path: Path) -> None:
    for _ in range(2):
        twins = Twins(Stack(Counting()), "aten", cache_dir=tmp_path)
        twins.step(an_input(5))
        assert twins.kept
    assert not [*tmp_path.glob("*.programs")]


def test_a_key_of_another_process_is_an_error() -> None:
    with pytest.raises(
        ExecutionError, match="call that stays PyTorch's, and its code is not there"
    ):
        kept("0.0")


def test_the_report_says_where_and_why_pytorch_runs() -> None:
    twins = Twins(Stack(Counting()), "aten")
    for _ in range(5):
        twins.step(an_input(5))
    text = str(twins.graph.report)
    assert "PyTorch   runs inner (" in text
    assert f"{Path(__file__).name}:" in text
    assert "of a step): the forward assigns" in text
    assert len(twins.graph.report.kept) == 1


def test_the_report_names_functions_and_operators() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = KINDS["saves its input"](x, self.linear(x))
            result: Tensor = torch.linalg.cholesky(h.T @ h + torch.eye(8))
            return result

    twins = Twins(Both(), "aten")
    twins.tolerance = 1e-5
    twins.step(an_input(9))
    text = str(twins.graph.report)
    assert "runs the custom autograd function tests.kept.functions.Scaled (" in text
    assert "runs the operator aten::linalg_cholesky" in text


def test_capture_alone_refuses_what_a_step_would_keep() -> None:
    with pytest.raises(CaptureError, match=r"inner\.runs"):
        capture(Stack(Counting()), (torch.randn(5, 8),))


def test_the_reference_engine_refuses_it() -> None:
    model = ORTModule(Stack(Counting()), options=Options(engine="reference", fallback="raise"))
    with pytest.raises(CaptureError):
        model(an_input(5))


def test_tokens_in_front_of_a_kept_call_are_all_computed() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.first = nn.Embedding(20, 8), nn.Linear(8, 8)
            self.last = nn.Linear(8, 3)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            h = KINDS["saves its input"](ids, torch.relu(self.first(self.words(ids))))
            return nn.functional.cross_entropy(self.last(h).view(-1, 3), labels.view(-1))

    twins = Twins(Tagger(), "aten")
    ids, labels = torch.randint(0, 20, (6, 10)), torch.randint(0, 3, (6, 10))
    labels[:, 4:] = -100
    twins.step(ids, labels)
    assert twins.kept


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
def test_a_backward_in_pieces_hands_contexts_to_the_piece_that_reads_them(engine: str) -> None:
    for pieces in (2, 3, 5):
        twins = Twins(Stack(Stack(Counting())), engine, backward_pieces=pieces)
        twins.module.last = nn.Linear(3, 3)
        twins.eager.last = nn.Linear(3, 3)
        twins.eager.last.load_state_dict(twins.module.last.state_dict())
        for rows in (5, 3):
            twins.step(an_input(rows))
        assert twins.kept
        assert len(_plan(twins).pieces) == pieces


def test_explain_shows_the_call_and_files_of_graphs_are_written(tmp_path: Path) -> None:
    module = Stack(Counting())
    shown = str(explain(module, torch.randn(5, 8), options=Options(engine="aten")))
    assert "kept.train(" in shown
    assert "kept.backward(" in shown
    debug = DebugOptions(save_onnx=True, onnx_prefix="kept", save_path=str(tmp_path))
    model = ORTModule(module, debug, options=Options(engine="aten", fallback="raise"))
    model(an_input(5)).sum().backward()
    assert [*tmp_path.glob("kept_forward_training.onnx")]

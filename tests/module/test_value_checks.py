"""Checks of values that only raise: the graph passes them, and an error is the module's own."""

from __future__ import annotations

import copy
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import ORTModule
from ortrain.capture.export import capture
from ortrain.capture.fx import checks
from ortrain.capture.trace.value_checks import passes
from ortrain.program import Program, Role, checks_of
from tests.module.agreement import GRAPH, SAME
from tests.module.checked import CHECKED, plain


class Module(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def outcome(module: nn.Module, x: Tensor) -> tuple[Any, ...]:
    """What a call returns and its gradients, or the error that it raises."""
    module.zero_grad()
    try:
        output = module(x)
    except Exception as error:
        return type(error), str(error)
    output.sum().backward()
    return output.detach(), *[p.grad.clone() for p in module.parameters()]


@pytest.mark.parametrize("function", CHECKED)
def test_values_raise_what_eager_raises_and_nothing_else_does(function: Any) -> None:
    eager = Module(function)
    model = ORTModule(copy.deepcopy(eager), options=GRAPH)
    x = torch.randn(4, 3)
    for given in (x, torch.full((4, 3), 1e4), x + 1, -torch.full((4, 3), 1e4), x):
        ours, theirs = outcome(model, given), outcome(eager, given)
        for mine, own in zip(ours, theirs, strict=True):
            if isinstance(own, Tensor) and isinstance(mine, Tensor):
                largest = max(float(own.nan_to_num().abs().max()), 1e-3)
                torch.testing.assert_close(mine, own, rtol=0, atol=SAME * largest, equal_nan=True)
            else:
                assert mine == own, (ours, theirs)
    assert model.report.mode == "graph"
    assert model.report.graph_calls >= 3


def test_a_first_call_that_raises_is_eagers_and_the_next_is_a_graph() -> None:
    model = ORTModule(Module(plain), options=GRAPH)
    with pytest.raises(ValueError, match="too large"):
        model(torch.full((4, 3), 1e4).sign() * 1e9 * model.layer.weight[0].sign())
    model(torch.randn(4, 3))
    assert model.report.mode == "graph"


def test_an_answer_that_is_not_the_tests_own_is_unknown() -> None:
    import sys

    found: list[bool | None] = []

    class Asked:
        def __bool__(self) -> bool:
            found.append(passes(sys._getframe(1)))
            return False

    value = Asked()
    if any([value]):
        raise ValueError
    if 1 if value else 0:
        raise ValueError
    kept = not value
    assert kept
    while value:
        raise ValueError
    assert found == [None, None, None, None]
    if value:
        raise ValueError
    assert found[-1] is False


class Branching(nn.Module):
    """A module with a branch on each of its inputs' values, a line for each, in a file."""

    def __init__(self, count: int, folder: Path) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        branches = [f"    if x[{i}] > 0: out = out + {i}" for i in range(count)]
        file = folder / "branching.py"
        file.write_text("\n".join(("def function(x, out):", *branches, "    return out")))
        self.function: Callable[[Tensor, Tensor], Tensor] = runpy.run_path(str(file))["function"]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.function(x, self.weight * 1))


@pytest.mark.old_front_end
def test_a_call_that_goes_another_way_is_told_at_which_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_BITS", 4)
    eager = Branching(6, tmp_path)
    model = ORTModule(copy.deepcopy(eager), options=GRAPH)
    for taken in ([], [0], [], [1, 2], [], [0, 3], [], [4], [], [2, 4, 5], []):
        x = -torch.ones(6)
        x[taken] = 1
        assert model(x) == eager(x)
        lines = sorted({min(i, 3) + 2 for i in taken})  # the last bit is that of all the others
        where = re.findall(r"another way at branching\.py:(\d+)", model.report.reason)
        assert [int(line) for line in where] == lines, model.report


def test_the_checks_of_a_program_are_in_its_file(tmp_path: Path) -> None:
    program = capture(Branching(3, tmp_path), (-torch.ones(3),), branches=True).program
    program.save(tmp_path / "program.onnx")
    (value,) = Program.load(tmp_path / "program.onnx").outputs(Role.CHECK)
    for line, check in enumerate(checks_of(value), 2):
        assert Path(__file__).name in check.where
        assert f"another way at branching.py:{line}, " in check.because
    assert len(checks_of(value)) == 3

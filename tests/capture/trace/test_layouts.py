"""Code that asks how a tensor lies in memory that lies as an input does.

It is refused, but where any answer has the same values.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ortrain import ORTModule
from ortrain.capture.export import capture
from ortrain.errors import CaptureError
from tests.module.agreement import GRAPH

MAKES_CONTIGUOUS = (
    "if not x.is_contiguous(): x = x.contiguous()",
    "if (not x.is_contiguous()): x = x.contiguous()",
    "x = x if x.is_contiguous() else x.contiguous()",
    "x = x.contiguous() if not x.is_contiguous() else x",
)
GOES_ON_WITH_IT = (
    "if x.is_contiguous(): x = x.contiguous()",
    "if not x.is_contiguous(): x = x.contiguous() * 2",
    "if not x.is_contiguous(): y = x.contiguous()",
    "if not x.is_contiguous(): x = x.contiguous(); x = x * 2",
    "if not (x.is_contiguous() and y.is_contiguous()): x = x.contiguous()",
    "x = x.contiguous() if x.is_contiguous() else y",
    "assert not x.is_contiguous()",
    "x = x * x.is_contiguous()",
)


class Written(nn.Module):
    """A module with a statement in its forward, from a file of its own."""

    def __init__(self, statement: str, folder: Path) -> None:
        super().__init__()
        lines = ("def function(x, y):", "    x = x.T", f"    {statement}", "    return x + y")
        file = folder / "written.py"
        file.write_text("\n".join(lines))
        self.function: Callable[[Tensor, Tensor], Tensor] = runpy.run_path(str(file))["function"]
        self.scale = nn.Parameter(torch.rand(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale, self.scale[:, None])


@pytest.mark.parametrize("statement", MAKES_CONTIGUOUS)
def test_code_may_ask_whether_to_make_a_tensor_contiguous(statement: str, tmp_path: Path) -> None:
    eager = Written(statement, tmp_path)
    model = ORTModule(eager, options=GRAPH)
    for x in (torch.randn(4, 5), torch.randn(6, 5), torch.randn(5, 4).T):
        torch.testing.assert_close(model(x), eager(x))
    assert model.report.mode == "graph", model.report.reason


@pytest.mark.parametrize("statement", GOES_ON_WITH_IT)
def test_code_that_goes_on_with_the_answer_is_refused(statement: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="asks for is_contiguous"):
        capture(Written(statement, tmp_path), (torch.randn(4, 5),))

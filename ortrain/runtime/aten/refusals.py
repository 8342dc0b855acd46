"""What of a lowered program cannot be written as calls of PyTorch, and why.

Some kernels see only while they write that they do not serve a form: PyTorch lacks a number of
axes, or a size is known too late. So the question is answered by writing the program.
"""

from __future__ import annotations

import onnx_ir as ir
import torch

from ortrain.errors import ExecutionError
from ortrain.graph import shapes
from ortrain.program import Program
from ortrain.runtime.aten.operands import Tensor
from ortrain.runtime.aten.table import find, named
from ortrain.runtime.aten.writer import Writer


def refusals(program: Program, device: str | torch.device = "cpu") -> dict[str, str]:
    """Why each operator that stops a lowered program from being compiled does so.

    Args:
        program: what ``AtenExecutor.lower`` returned.
        device: that the tensors would be on.

    Returns:
        The reason of the first node of each operator, ``domain::`` before foreign ones; nothing
        where the program compiles.
    """
    trial = _Trial(program, torch.device(device))
    try:
        trial.write()
    except ExecutionError as error:  # not of a node, so that nothing else was recorded
        trial.reasons.setdefault("program", str(error))
    return dict(sorted(trial.reasons.items()))


def missing(program: Program, device: str | torch.device = "cpu") -> list[str]:
    """The operators that stop a lowered program from being compiled."""
    return [*refusals(program, device)]


class _Trial(Writer):
    """Writes on behind what is refused, with a tensor in its place.

    Attributes:
        reasons: of what was refused, by operator.
    """

    def __init__(self, program: Program, device: torch.device) -> None:
        super().__init__(program, device)
        self.reasons: dict[str, str] = {}
        self._unknown: set[ir.Value] = set()

    def _node(self, node: ir.Node) -> None:
        try:
            super()._node(node)
        except ExecutionError as error:
            # What follows from it may be known no better: that is no reason of its own.
            if find(node) is None or self._unknown.isdisjoint(v for v in node.inputs if v):
                self.reasons.setdefault(named(node), error.because or str(error))
            for value in node.outputs:
                self._unknown.add(value)
                tensor = self.own(Tensor(self, self.name(value.name or "x"), value.dtype))
                tensor.dims = shapes.dims(value)
                self.values[value] = tensor

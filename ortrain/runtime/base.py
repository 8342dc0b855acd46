"""What every executor is: programs in, programs that run out, and tensors through both.

A program that runs takes and gives *values*: whatever its executor computes with, an ``OrtValue``,
a tensor or an array. Only its executor's :class:`Exchange` knows what they are; the step that runs
programs under autograd keeps them between forward and backward and looks into none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import onnx_ir as ir

from ortrain.program import Program
from ortrain.runtime.memory import Ceiling
from ortrain.runtime.replays import Replays

if TYPE_CHECKING:
    import numpy as np
    import torch

Value = Any
"""What an executor computes with."""


class Exchange(Protocol):
    """How tensors become an executor's values and values tensors, sharing memory where it can."""

    def take(self, tensor: torch.Tensor) -> Value:
        """A value of the tensor; one over the same memory, which it keeps alive, where it can."""

    def shares(self, tensor: torch.Tensor) -> bool:
        """Whether the value that :meth:`take` makes of the tensor shares its memory."""

    def give(self, value: Value) -> torch.Tensor:
        """A tensor over the memory of a value, which it keeps alive."""

    def at(self, values: Sequence[Value], index: int, is_bool: bool) -> torch.Tensor:
        """One of the values that a program has returned, as a tensor; whether it is of bools."""

    def all(self, values: Sequence[Value], bools: Collection[int] = ()) -> list[torch.Tensor]:
        """All values that a program has returned, as tensors; the places of those of bools."""


class Compiled(Protocol):
    """A program that runs."""

    @property
    def source(self) -> str:
        """What it runs as, for people; empty where there is nothing to read."""

    def run_values(self, feeds: list[Value]) -> Sequence[Value]:
        """Runs on values in the order of the program's inputs.

        Args:
            feeds: may be emptied, so that what nobody else keeps is freed as soon as it was read.

        Returns:
            Values in the order of the program's outputs. None shares memory with a feed or with
            another one.

        Raises:
            ExecutionError: the runtime refused or failed.
        """

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Runs on numpy arrays in the order of the program's inputs."""


class Executor(Protocol):
    """Runs programs in a way of its own.

    Attributes:
        name: by which users choose it.
        frees: whether a program frees what it was given as soon as it has read it.
        ceiling: above which memory that it keeps goes back to the system; None for nowhere.
    """

    name: str
    frees: bool
    ceiling: Ceiling | None

    @property
    def exchange(self) -> Exchange:
        """Of tensors with its programs."""

    @property
    def replays(self) -> Replays | None:
        """How its programs were recorded and replayed; None where they are not."""

    def keeps(self, node: ir.Node) -> bool:
        """Whether it has something better for a composite of a gradient than its body."""

    def cheap(self, node: ir.Node) -> bool:
        """Whether a forward node runs again in the backward rather than have its result kept."""

    def lower(self, program: Program) -> Program:
        """A copy of the program in the operators that it runs best."""

    def compile(self, program: Program) -> Compiled:
        """Makes something that runs of a lowered program.

        Raises:
            ExecutionError: it cannot run the program.
        """

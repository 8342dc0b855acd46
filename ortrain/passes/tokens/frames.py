"""Which axes of a value are the row and the position of a token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.program import Program, Role


@dataclass(frozen=True)
class Grid:
    """The tokens of a batch: rows of one length.

    Attributes:
        rows: the symbol of their number.
        length: the symbol of their length.
    """

    rows: str
    length: str

    @property
    def flat(self) -> tuple[str, str]:
        """How the size of an axis is written that has one place for each token."""
        return f"{self.rows}*{self.length}", f"{self.length}*{self.rows}"


@dataclass(frozen=True)
class Frame:
    """Where a value has its tokens.

    Attributes:
        grid: which tokens.
        axes: the axis of the row and that of the position; or one axis that has both, row by row.
    """

    grid: Grid
    axes: tuple[int, ...]

    @property
    def is_flat(self) -> bool:
        """Whether one axis has row and position."""
        return len(self.axes) == 1


def grids(program: Program) -> list[Grid]:
    """Of the program's inputs: the first two axes of each that has two without fixed sizes."""
    found: dict[Grid, None] = {}
    for value in program.inputs(Role.USER_INPUT):
        first = (shapes.dims(value) or ())[:2]
        if len(first) == 2 and all(isinstance(d, str) for d in first) and first[0] != first[1]:
            found[Grid(str(first[0]), str(first[1]))] = None
    return [*found]


class Frames(Mapping[ir.Value, Frame]):
    """The frames of a program's values, as far as their sizes tell.

    Two axes of different sizes stand for row and position where each size is that of no other
    axis. It need not be the length of a sentence: whatever has its places to itself may be packed.

    Args:
        program: whose values have shapes.
    """

    def __init__(self, program: Program) -> None:
        self.grids = grids(program)
        self._found: dict[ir.Value, Frame] = {}
        values = [v for node in program.graph for v in node.outputs]
        for value in (*program.graph.inputs, *values):
            frame = self._frame(value)
            if frame is not None:
                self._found[value] = frame

    def _frame(self, value: ir.Value) -> Frame | None:
        dims = shapes.dims(value)
        if not dims:
            return None
        fitting = []
        for grid in self.grids:
            if dims[0] in grid.flat:
                fitting.append(Frame(grid, (0,)))
            elif dims.count(grid.rows) == dims.count(grid.length) == 1:
                fitting.append(Frame(grid, (dims.index(grid.rows), dims.index(grid.length))))
        return fitting[0] if len(fitting) == 1 else None

    def __getitem__(self, value: ir.Value) -> Frame:
        return self._found[value]

    def __iter__(self) -> Iterator[ir.Value]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

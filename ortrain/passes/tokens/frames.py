"""Which axes of a value are the row and the position of a token."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.program import Program, Role


@dataclass(frozen=True)
class Monomial:
    """A size as a number times symbols.

    Attributes:
        number: the factor.
        symbols: in order; an expression that is no product is one of its own.
    """

    number: int = 1
    symbols: tuple[str, ...] = ()

    @staticmethod
    def of(dim: shapes.Dim) -> Monomial | None:
        """A size, None where it is not known."""
        if dim is None:
            return None
        if isinstance(dim, int):
            return Monomial(dim)
        parts = dim.split("*")
        if not all(re.fullmatch(r"\s*\w+\s*", part) for part in parts):
            return Monomial(1, (dim,))
        parts = [part.strip() for part in parts]
        number = math.prod(int(part) for part in parts if part.isdecimal())
        return Monomial(number, tuple(sorted(p for p in parts if not p.isdecimal())))

    @staticmethod
    def product(dims: Sequence[shapes.Dim]) -> Monomial | None:
        """Of sizes, None where one is not known."""
        found = [Monomial.of(dim) for dim in dims]
        known = [each for each in found if each is not None]
        if len(known) != len(found):
            return None
        symbols = tuple(sorted(name for each in known for name in each.symbols))
        return Monomial(math.prod(each.number for each in known), symbols)

    def times(self, other: Monomial) -> Monomial:
        """The product of two."""
        symbols = tuple(sorted(self.symbols + other.symbols))
        return Monomial(self.number * other.number, symbols)


@dataclass(frozen=True)
class Grid:
    """The tokens of a batch: rows of one length.

    Attributes:
        rows: the size that is their number, a symbol or a product.
        length: the symbol of their length.
    """

    rows: str
    length: str


@dataclass(frozen=True)
class Frame:
    """Where a value has its tokens.

    Attributes:
        grid: which tokens.
        axes: the axis of the row and that of the position; or one axis that has both, row by row.
        heads: how many places the axis of the row has for each row, one behind another.
    """

    grid: Grid
    axes: tuple[int, ...]
    heads: int = 1

    @property
    def is_flat(self) -> bool:
        """Whether one axis has row and position."""
        return len(self.axes) == 1

    @property
    def position(self) -> int:
        """The axis of the position."""
        return self.axes[-1]

    def strides(self, dims: Sequence[shapes.Dim]) -> tuple[Monomial, Monomial] | None:
        """How far two rows, and two positions, lie apart in a value of these sizes.

        A value that is reshaped has the same tokens where these are the same.
        """
        behind = [Monomial.product(dims[a + 1 :]) for a in self.axes]
        if any(each is None for each in behind):
            return None
        row, position = behind[0], behind[-1]
        assert row is not None
        assert position is not None
        length = Monomial(1, (self.grid.length,))
        return row.times(length if self.is_flat else Monomial(self.heads)), position


def grids(program: Program) -> list[Grid]:
    """Of the program's inputs: the first two axes of each that has two without fixed sizes.

    Where the graph makes rows of the first two of three, as of several choices for each question,
    the rows are those.
    """
    found: dict[Grid, None] = {}
    leading = {
        (Monomial.of(dims[0]), dims[1])
        for node in program.graph
        for value in node.outputs
        if len(dims := shapes.dims(value) or ()) > 1
    }
    for value in program.inputs(Role.USER_INPUT):
        dims = (shapes.dims(value) or ())[:3]
        if len(dims) == 3 and isinstance(dims[0], str) and isinstance(dims[2], str):
            rows = Monomial.product(dims[:2])
            if dims[1] not in (1, None, dims[2]) and (rows, dims[2]) in leading:
                found[Grid(f"{dims[0]}*{dims[1]}", dims[2])] = None
                continue
        first = dims[:2]
        if len(first) == 2 and all(isinstance(d, str) for d in first) and first[0] != first[1]:
            found[Grid(str(first[0]), str(first[1]))] = None
    return [*found]


class Frames(Mapping[ir.Value, Frame]):
    """The frames of a program's values, as far as their sizes tell.

    Two axes of different sizes stand for row and position where the size of the row is that of no
    other axis. It need not be the length of a sentence: whatever has its places to itself may be
    packed. The scores of attention have several frames, one for the queries and one for the keys.
    As a mapping it has the values with one frame and a row to itself, which can be packed.

    Args:
        program: whose values have shapes.
    """

    def __init__(self, program: Program) -> None:
        self.grids = grids(program)
        self._all: dict[ir.Value, tuple[Frame, ...]] = {}
        self._found: dict[ir.Value, Frame] = {}
        values = [v for node in program.graph for v in node.outputs]
        for value in (*program.graph.inputs, *values):
            frames = self._frames(value)
            if frames:
                self._all[value] = frames
            if len(frames) == 1 and frames[0].heads == 1:
                self._found[value] = frames[0]

    def every(self, value: ir.Value | None) -> tuple[Frame, ...]:
        """All frames of a value."""
        return () if value is None else self._all.get(value, ())

    def _frames(self, value: ir.Value) -> tuple[Frame, ...]:
        dims = shapes.dims(value)
        if not dims:
            return ()
        sizes = [Monomial.of(dim) for dim in dims]
        found = [frame for grid in self.grids for frame in _of_grid(sizes, dims, grid)]
        exact = {frame.axes for frame in found if frame.heads == 1}
        return tuple(f for f in found if f.heads == 1 or f.axes not in exact)

    def __getitem__(self, value: ir.Value) -> Frame:
        return self._found[value]

    def __iter__(self) -> Iterator[ir.Value]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def _of_grid(
    sizes: Sequence[Monomial | None], dims: Sequence[shapes.Dim], grid: Grid
) -> list[Frame]:
    """The frames of a value for one grid."""
    rows, length = Monomial.of(grid.rows), Monomial.of(grid.length)
    assert rows is not None
    assert length is not None
    if sizes[0] == rows.times(length):
        return [Frame(grid, (0,))]
    found = [a for a, size in enumerate(sizes) if size and size.symbols == rows.symbols]
    if len(found) != 1:
        return []
    size = sizes[found[0]]
    assert size is not None
    heads, rest = divmod(size.number, rows.number)
    if rest or not heads:
        return []
    return [Frame(grid, (found[0], a), heads) for a, dim in enumerate(dims) if dim == grid.length]

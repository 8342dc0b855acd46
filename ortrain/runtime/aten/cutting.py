"""Finds what may run in strips: attention, from the product of scores to those that read them.

A row of lines::

    scores = batches.matmul(query, key)
    weights = torch.softmax(scores, -1)
    dropped = hash.dropout(weights, seed, 1, …)
    result = batches.matmul(dropped, value)

becomes a function, where no tensor as large as the scores enters it or leaves it::

    def strip(row, query, key, value):
        …
        return [result]
    result, = strips.run(strip, [query, key, value], [0, 0, 0], 2, …)

The backward is such a row as well, with the scores made again. Each line in it takes the axes
before the last two, batches and heads, element by element.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property

from ortrain.graph.shapes import Dim
from ortrain.runtime.aten.lines import Block, Line, Raw, render, written
from ortrain.runtime.aten.operands import Size, Tensor
from ortrain.runtime.aten.operators import ALONG_AN_AXIS, ELEMENTWISE

_SOFTMAX = frozenset({"torch.softmax", "torch._softmax_backward_data"})
_PRODUCTS = frozenset(
    {"torch.matmul", "batches.matmul", "batches.wide_matmul", "batches.scaled_matmul"}
)
_DROPOUT = "hash.dropout"
# Place of a dropout's index, a number for each row.
_INDEX = 5
_EACH = ELEMENTWISE - ALONG_AN_AXIS
# Calls that may change places with others.
_PURE = tuple(
    "torch. aten. nn. batches. blas. convolutions. hash. late. norms. strips. . = def".split()
)

Dims = tuple[Dim, ...]


def cut(block: Block, name: Callable[[str], str]) -> None:
    """Puts each such row of lines into a function of its own, in place.

    Args:
        block: lines of a whole function, of which nothing is planned yet.
        name: gives one that is not taken.
    """
    flow = _Flow(block)
    for seed in [line for line in block.lines if line.function in _SOFTMAX]:
        if seed in block.lines and _is_of_each_head(seed):
            row = _Row(block, seed, flow)
            if row.keeps_scores() and row.can_be_moved():
                row.move(name)
                flow = _Flow(block)


class _Flow:
    """Which lines of a function make its tensors, and which read them."""

    def __init__(self, block: Block) -> None:
        self.makers = {t: line for line in block.lines for t in line.targets}
        self.readers: dict[Tensor, list[Line]] = {}
        for line in block.lines:
            for tensor in line.reads():
                self.readers.setdefault(tensor, []).append(line)


class _Row:
    """The lines that make or read scores around one of them, in the order of the function."""

    def __init__(self, block: Block, seed: Line, flow: _Flow) -> None:
        self.block = block
        self.scores = _made(seed).dims or ()
        self.makers, self.readers = flow.makers, flow.readers
        found = {seed: None}
        while more := {line: None for line in self._around(found) if line not in found}:
            found |= more
        self.lines = [line for line in block.lines if line in found]
        self.made = {_made(line) for line in self.lines}
        returned = [t for t in block.results if isinstance(t, Tensor)]
        self.results = [
            t
            for t in map(_made, self.lines)
            if t in returned or any(line not in found for line in self.readers.get(t, ()))
        ]
        start, end = (block.lines.index(line) for line in (self.lines[0], self.lines[-1]))
        self.place = slice(start, end + 1)
        self.between = [line for line in block.lines[self.place] if line not in found]

    def _around(self, row: Collection[Line]) -> Iterator[Line]:
        """Lines that read what a row makes, and those that make what nobody else reads."""
        for line in row:
            for reader in self.readers.get(_made(line), ()):
                if self._belongs(reader):
                    yield reader
            for tensor in line.reads():
                maker = self.makers.get(tensor)
                only_here = all(reader in row for reader in self.readers[tensor])
                if maker is not None and only_here and self._belongs(maker):
                    yield maker

    def _belongs(self, line: Line) -> bool:
        """Whether a line makes scores or reads them, and each head's apart."""
        return _is_of_each_head(line) and any(map(self._are_scores, (_made(line), *line.reads())))

    def _are_scores(self, tensor: Tensor) -> bool:
        """Whether a tensor is as large as the scores: they, or their transpose."""
        *lead, rows, columns = self.scores
        return tensor.dims in ((*lead, rows, columns), (*lead, columns, rows))

    def keeps_scores(self) -> bool:
        """Whether scores are made and read here, and neither enter nor leave."""
        given = [t for line in self.lines for t in line.reads() if t not in self.made]
        others = [root for t in (*self.results, *dict.fromkeys(given)) for root in t.roots]
        return (
            self.product is not None
            and self.operands is not None
            and bool(self.results)
            and not any(map(self._are_scores, (*given, *self.results)))
            and all(t.dims is not None and t.dims[:-2] == self.scores[:-2] for t in self.results)
            # Where all is one strip they are returned as they are, and share memory with nothing.
            and all(others.count(root) == 1 for t in self.results for root in t.roots)
        )

    @cached_property
    def product(self) -> Line | None:
        """The first one that makes scores of what is given."""
        return next(
            (
                line
                for line in self.lines
                if line.function in _PRODUCTS
                and self._are_scores(_made(line))
                and not any(t in self.made for t in line.reads())
            ),
            None,
        )

    @cached_property
    def operands(self) -> dict[Tensor, int] | None:
        """What is given that has batches or heads, and how many axes of these it lacks.

        None where two lines see one tensor differently.
        """
        rank, found = len(self.scores), dict[Tensor, int]()
        for line in self.lines:
            for place, tensor in enumerate(line.args):
                if not isinstance(tensor, Tensor) or tensor in self.made:
                    continue
                is_index = line.function == _DROPOUT and place == _INDEX
                lacks = 0 if is_index else rank - tensor.rank
                if found.setdefault(tensor, lacks) != lacks:
                    return None
        return {tensor: lacks for tensor, lacks in found.items() if lacks < rank - 2}

    def can_be_moved(self) -> bool:
        """Whether the lines between these may run before or after all of them."""
        needed = {name for line in self.lines for name in _names_read(line)}
        return (
            all(line.function.startswith(_PURE) for line in self.between)
            and not _names_made(self.after) & needed
        )

    @cached_property
    def after(self) -> list[Line]:
        """The lines between these that read what is made here."""
        made, after = _names_made(self.lines), []
        for line in self.between:
            if _names_read(line) & made:
                made |= _names_made([line])
                after.append(line)
        return after

    def move(self, name: Callable[[str], str]) -> None:
        """Puts the lines into a function that runs in strips."""
        assert self.product is not None
        assert self.operands is not None
        left, right = self.product.args[:2]
        first, origin = Size(name("row")), self.lines[0].origin
        for line in self.lines:
            if line.function == _DROPOUT and len(line.args) <= _INDEX:
                line.kwargs["first"] = Raw(f"{first} * {line.args[0]}.shape[-2]")
        operands, lacking = [*self.operands], [*self.operands.values()]
        body = Block(name("strip"), operands, self.block, [first], self.lines, [*self.results])
        size = Raw(f"{left}.shape[-2] * {right}.shape[-1]")
        given = (body, operands, lacking, len(self.scores) - 2, size)
        self.block.lines[self.place] = [
            *[line for line in self.between if line not in self.after],
            Line([], "def", body=body, origin=origin),
            Line([*self.results], "strips.run", given, is_tuple=True, origin=origin),
            *self.after,
        ]


# -- one line --------------------------------------------------------------------------------------


def _made(line: Line) -> Tensor:
    (target,) = line.targets
    assert isinstance(target, Tensor)
    return target


def _is_of_each_head(line: Line) -> bool:
    """Whether a line makes one tensor, and each element of the axes before the last two apart."""
    made = line.targets[0] if len(line.targets) == 1 else None
    if not isinstance(made, Tensor) or line.body is not None or line.is_tuple:
        return False
    if made.dims is None or None in made.dims or made.rank not in (3, 4):
        return False
    tensors = [a for a in line.args if isinstance(a, Tensor)]
    if tensors != line.reads() or not tensors or any(t.dims is None for t in tensors):
        return False
    if max(t.rank for t in tensors) != made.rank:
        return False
    numbers = [a for a in line.args[1:] if not isinstance(a, Tensor)]
    last = made.rank - 1
    if line.function in _PRODUCTS:
        return min(t.rank for t in tensors) >= 2
    if line.function in _SOFTMAX:
        return numbers[0] in (-1, last)
    if line.function == _DROPOUT:
        return tensors[0].rank == made.rank and not line.kwargs
    if line.function == ".transpose":
        return {axis % made.rank for axis in numbers} == {last - 1, last}
    module, _, name = line.function.rpartition(".")
    return name in _EACH and module in ("", "torch", "aten", "nn")


def _names_made(lines: Iterable[Line]) -> set[str]:
    return {str(target) for line in lines for target in line.targets} | {
        line.body.name for line in lines if line.body is not None
    }


def _names_read(line: Line) -> set[str]:
    """Each name in a line's source, be it of a tensor or of a size."""
    text = written(line) if line.body is None else render(line.body)
    return set(re.findall(r"(?<![\w.])[A-Za-z_]\w*", text)) - {str(t) for t in line.targets}

"""Sets of tokens in the graph: at which places of a batch their tokens are, and how many."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.passes.clean import clean
from ortrain.passes.tokens.frames import Grid
from ortrain.passes.tokens.kept import (
    KEY,
    QUERY,
    ROW,
    SHUT,
    Condition,
    Kept,
    Keys,
    Labels,
    Position,
    Set,
)
from ortrain.program import ROLE, Program, Role

# The tokens of attention are as many as a multiple of this, so that their numbers come again: for
# each that is new, oneDNN makes every product's code anew, and it keeps 1024 pieces, of 0.3 to
# 0.5 MB. In bfloat16 a step of MiniLM on 16 texts of new lengths took 157 ms and the next one of
# the same lengths 146; with this, 2 to 4 ms are left of the 11.
MULTIPLE = 16
# In a batch of fewer places, the tokens that are too many are more than that brings.
LARGE = 1024

# Of several masks one that is higher than this is open for certain: all of them together are still
# higher than one that is shut.
_OPEN = SHUT / 1e3


@dataclass(frozen=True)
class Tokens:
    """A set of tokens in the graph.

    Attributes:
        read: bool [B * S], where they are.
        mask: the same, with those that are there to make their number a multiple.
        places: int64 [T], of all of these in the batch.
        symbol: the name of T.
    """

    read: ir.Value
    mask: ir.Value
    places: ir.Value
    symbol: str


class Sets:
    """Makes sets of tokens, each once, of what a program is given.

    Args:
        program: what they need is put at the end of its graph, which is to be sorted.
        rounded: whether sets of keys get more tokens, up to a multiple of some number.

    Attributes:
        made: the sets.
        short: grid → the name of the number of its first positions that hold all tokens of some.
    """

    def __init__(self, program: Program, *, rounded: bool) -> None:
        self.program, self.rounded = program, rounded
        self.made: dict[tuple[Set, Grid], Tokens] = {}
        self.short: dict[Grid, str] = {}
        self.end = Builder(program.graph, opset=program.opset, prefix="tokens")
        self._known: dict[tuple[object, ...], ir.Value] = {}

    def once(self, key: tuple[object, ...], make: Callable[[], ir.Value]) -> ir.Value:
        """What is made at most once, at the end of the graph.

        Args:
            key: of it.
            make: writes it.
        """
        known = self._known.get(key)
        if known is None:
            with self.end:
                known = self._known[key] = make()
        return known

    # -- sizes ---------------------------------------------------------------------------------

    def is_known(self, dim: shapes.Dim) -> bool:
        """Whether a size is a number, or one of the inputs', or a product of those."""
        named = {d for v in self.program.graph.inputs for d in shapes.dims(v) or ()}
        if dim is None or isinstance(dim, int):
            return dim is not None
        return all(part.isdecimal() or part in named for part in dim.split("*"))

    def dim(self, dim: shapes.Dim) -> ir.Value:
        """A size of the whole batch, int64 [1]."""

        def make() -> ir.Value:
            if isinstance(dim, str) and "*" in dim:
                first, *others = map(self.dim, dim.split("*"))
                for other in others:
                    first = self.end.Mul(first, other)
                return first
            if isinstance(dim, int) or (dim is not None and dim.isdecimal()):
                return self.end.constant([int(dim)], ir.DataType.INT64)
            for value in self.program.graph.inputs:
                dims = shapes.dims(value) or ()
                if dim in dims:
                    return self.end.dim(value, dims.index(dim))
            raise AssertionError("grids are those of inputs")

        return self.once(("size", dim), make)

    def sizes(self, grid: Grid) -> ir.Value:
        """The number of rows and the length, int64 [2]."""
        parts = [self.dim(grid.rows), self.dim(grid.length)]
        return self.once(("sizes", grid), lambda: self.end.Concat(*parts, axis=0))

    # -- the first positions of rows -----------------------------------------------------------

    def shorten(self, wanted: Set, grid: Grid, mixed: Collection[Collection[Condition]]) -> None:
        """Counts the positions as far as the last token of some sets, in whichever row.

        Args:
            wanted: the sets.
            grid: of the rows and positions.
            mixed: where of some of these one shuts keys out by minus infinity and one by a number,
                all positions count.
        """
        mask = self._union(wanted, grid)
        with self.end as op:
            length = op.Squeeze(self.dim(grid.length), [0])
            numbers = op.Range(np.int64(1), op.Add(length, 1), np.int64(1))
            there = op.cast(op.Reshape(mask, self.sizes(grid)), ir.DataType.INT64)
            last = op.Reshape(op.ReduceMax(op.Mul(there, numbers), [0, 1], keepdims=0), [1])
            for each in mixed:
                if each:
                    last = op.Where(self._mixes(each), op.Unsqueeze(length, [0]), last)
        self._known["short", grid] = last
        self.short[grid] = f"short{len(self.short)}"

    def _mixes(self, conditions: Collection[Condition]) -> ir.Value:
        """Whether some keys are shut out by minus infinity and others by a number, bool."""
        op = self.end
        infinite: list[ir.Value] = []
        numbers: list[ir.Value] = []
        for each in sorted(conditions, key=lambda c: c.names):
            if not each.adds:
                (numbers if each.finite else infinite).append(op.constant(True, ir.DataType.BOOL))
                continue
            value, axes = each.value, [*range(len(each.places))]
            dead = op.Equal(value, op.constant(-np.inf, value.dtype))
            low = op.Not(op.Greater(value, op.constant(SHUT, value.dtype)))
            infinite.append(_any(op, dead, axes))
            numbers.append(_any(op, op.And(low, op.Not(dead)), axes))
        result: ir.Value = op.And(self._one(infinite), self._one(numbers))
        return result

    def _one(self, found: list[ir.Value]) -> ir.Value:
        """Whether one of some is true."""
        result = found[0]
        for each in found[1:]:
            result = self.end.Or(result, each)
        return result

    def short_length(self, grid: Grid) -> ir.Value:
        """How many positions that are, int64 [1]."""
        return self._known["short", grid]

    def short_sizes(self, grid: Grid) -> ir.Value:
        """The number of rows and of those positions, int64 [2]."""
        parts = [self.dim(grid.rows), self.short_length(grid)]
        return self.once(("short sizes", grid), lambda: self.end.Concat(*parts, axis=0))

    def short_places(self, own: Tokens, grid: Grid) -> ir.Value:
        """The places of a set's tokens where rows have no more than those positions, int64 [T]."""

        def make() -> ir.Value:
            op, length = self.end, self.dim(grid.length)
            row, position = op.Div(own.places, length), op.Mod(own.places, length)
            result: ir.Value = op.Add(op.Mul(row, self.short_length(grid)), position)
            return result

        return self.once(("short places", own.symbol, grid), make)

    def short_rows(self, grid: Grid, between: Sequence[int]) -> ir.Value:
        """What number each row of scores [B, between, S, S] has, of those positions, int64.

        Args:
            grid: of rows and positions.
            between: sizes of the axes between them.
        """

        def make() -> ir.Value:
            op, length, short = self.end, self.dim(grid.length), self.short_length(grid)
            count = op.Squeeze(op.Mul(self.dim(grid.rows), math.prod(between)), [0])
            first = op.Mul(op.Range(np.int64(0), count, np.int64(1)), length)
            inner = op.Range(np.int64(0), op.Squeeze(short, [0]), np.int64(1))
            numbers = op.Add(op.Unsqueeze(first, [1]), inner)
            middle = [op.constant([*between], ir.DataType.INT64)] if between else []
            result: ir.Value = op.Reshape(
                numbers, op.Concat(self.dim(grid.rows), *middle, short, axis=0)
            )
            return result

        return self.once(("short rows", grid, *between), make)

    # -- sets ----------------------------------------------------------------------------------

    def of(self, wanted: Set, grid: Grid) -> Tokens:
        """The union of some sets."""
        known = self.made.get((wanted, grid))
        if known is None:
            read = mask = self._union(wanted, grid)
            if self.rounded and any(isinstance(kept, Keys) for kept in wanted):
                # The same in each set, so that one stays part of another.
                more = self.once(("more", grid), lambda: self._more(read, grid))
                mask = self.once(("rounded", read), lambda: self.end.Or(read, more))
            with self.end as op:
                places = op.Squeeze(op.NonZero(mask), [0])
            symbol = f"tokens{len(self.made)}"
            places.shape = ir.Shape([symbol])
            known = self.made[wanted, grid] = Tokens(read, mask, places, symbol)
        return known

    def _more(self, mask: ir.Value, grid: Grid) -> ir.Value:
        """The first places without a token, as many as a set lacks to the multiple: bool [B * S].

        Where rows are cut short, they are among the positions that are left. Of a row without any
        token there are none: what attention finds there may be no number.
        """
        op, length = self.end, self.dim(grid.length)
        total = op.Mul(self.dim(grid.rows), length)
        rows = op.Reshape(mask, self.sizes(grid))
        free = op.And(op.Not(rows), _any(op, rows, [1], keepdims=1))
        if grid in self.short:
            positions = op.Range(np.int64(0), op.Squeeze(length, [0]), np.int64(1))
            free = op.And(free, op.Less(positions, self.short_length(grid)))
        free = op.Reshape(free, [-1])
        large = op.Not(op.Less(total, op.constant([LARGE], ir.DataType.INT64)))
        multiple = op.Where(large, np.int64(MULTIPLE), np.int64(1))
        count = op.ReduceSum(op.cast(mask, ir.DataType.INT64), [0], keepdims=1)
        lacking = op.Mod(op.Neg(count), multiple)
        ranks = op.CumSum(op.cast(free, ir.DataType.INT64), np.int64(0))
        result: ir.Value = op.And(free, op.Not(op.Greater(ranks, lacking)))
        return result

    def within(self, at: Set, wanted: Set, grid: Grid) -> ir.Value:
        """The places of one set's tokens among those of a set that has them all, int64 [T]."""
        outer, inner = self.of(at, grid), self.of(wanted, grid)

        def make() -> ir.Value:
            op = self.end
            ranks = op.Sub(op.CumSum(op.cast(outer.mask, ir.DataType.INT64), np.int64(0)), 1)
            result: ir.Value = op.Gather(ranks, inner.places, axis=0)
            return result

        return self.once(("within", at, wanted, grid), make)

    def _union(self, wanted: Set, grid: Grid) -> ir.Value:
        """Sets as bool [B * S]."""
        in_order = sorted(wanted, key=lambda kept: kept.names)
        return self._one([self._mask(kept, grid) for kept in in_order])

    def _mask(self, kept: Kept, grid: Grid) -> ir.Value:
        return self.once(("mask", kept, grid), lambda: self._made(kept, grid))

    def _made(self, kept: Kept, grid: Grid) -> ir.Value:
        op = self.end
        if isinstance(kept, Position):
            last = op.Squeeze(self.dim(grid.length), [0])
            place = op.constant(kept.number, ir.DataType.INT64)
            if kept.number < 0:
                place = op.Add(last, kept.number)
            chosen = op.Equal(op.Range(np.int64(0), last, np.int64(1)), place)
            found = op.Expand(chosen, self.sizes(grid))
        elif isinstance(kept, Labels):
            found = op.Not(op.Equal(kept.value, kept.ignored))
        else:
            found = self._keys(kept, grid)
        result: ir.Value = op.Reshape(found, [-1])
        return result

    def _keys(self, kept: Keys, grid: Grid) -> ir.Value:
        """The keys that conditions let some query see, bool [B, S]."""
        op, several = self.end, len(kept.conditions) > 1
        places = {p for each in kept.conditions for p in each.places if p is not None}
        axes = [ROW, *sorted(p for p in places if p >= 0), QUERY, KEY]
        axes = [a for a in axes if a in places or a in (ROW, KEY)]
        shown = [self._shown(each, axes, several) for each in kept.conditions]
        seen, open_ = self._all([s.seen for s in shown]), self._all([s.open for s in shown])
        lifted = [s.lifted for s in shown if s.lifted is not None]
        for each in lifted:
            seen = op.Or(seen, each)
        between = list(range(1, len(axes) - 1))
        result = _any(op, seen, between)
        if not kept.loses:
            return result
        lost = op.Not(_any(op, open_, [-1], keepdims=1))  # [B, ..., Q, 1]
        dead = [s.dead for s in shown if s.dead is not None]
        if kept.queries is None:
            for each in dead:
                lost = op.And(lost, op.Not(each))
        else:
            lost = op.And(lost, self._asked(kept, result, grid, len(axes)))
        everything: ir.Value = op.Or(result, _any(op, lost, between))
        return everything

    def _asked(self, kept: Keys, seen: ir.Value, grid: Grid, rank: int) -> ir.Value:
        """The queries that are read, bool [B, 1, ..., Q, 1]; a key that is seen is one, too."""
        op = self.end
        assert kept.queries is not None
        assert kept.grid is not None
        asked: ir.Value | None = None
        if kept.queries:
            mask = self._union(kept.queries, kept.grid)
            asked = op.Reshape(mask, self.sizes(kept.grid))
        if kept.grid == grid:
            asked = seen if asked is None else op.Or(asked, seen)
        if asked is None:
            return op.constant(False, ir.DataType.BOOL)
        found: ir.Value = op.Unsqueeze(asked, [*range(1, rank - 2), rank - 1])
        return found

    def _all(self, conditions: list[ir.Value]) -> ir.Value:
        result = conditions[0]
        for each in conditions[1:]:
            result = self.end.And(result, each)
        return result

    def _shown(self, condition: Condition, axes: list[int], several: bool) -> _Shown:
        """What a condition says of keys, with these axes."""
        op = self.end
        value = self.once(
            ("axes", condition.value, condition.places, tuple(axes)),
            lambda: self._laid_out(condition, axes),
        )
        if condition.adds:
            seen = op.Greater(value, op.constant(SHUT, value.dtype))
            dead = op.Equal(value, op.constant(-np.inf, value.dtype))
            if not several:
                return _Shown(seen, seen, dead)
            open_ = op.Greater(value, op.constant(_OPEN, value.dtype))
            # What is as high as others are low opens what they shut.
            lifted = op.Not(op.Less(value, op.constant(-_OPEN, value.dtype)))
            return _Shown(seen, open_, dead, lifted)
        seen = op.cast(value, ir.DataType.BOOL)
        seen = op.Not(seen) if condition.negated else seen
        return _Shown(seen, seen, None if condition.finite else op.Not(seen))

    def _laid_out(self, condition: Condition, axes: list[int]) -> ir.Value:
        """The value of a condition with axes in this order, of size 1 where it has none."""
        op, value = self.end, condition.value
        single = [a for a, place in enumerate(condition.places) if place is None]
        if single:
            value = op.Squeeze(value, single)
        places = [place for place in condition.places if place is not None]
        order = sorted(range(len(places)), key=lambda a: axes.index(places[a]))
        if order != list(range(len(places))):
            value = op.Transpose(value, perm=order)
        missing = [i for i, axis in enumerate(axes) if axis not in places]
        laid_out: ir.Value = op.Unsqueeze(value, missing) if missing else value
        return laid_out


@dataclass(frozen=True)
class _Shown:
    """What a condition says: bool, broadcastable to [B, ..., Q, S].

    Attributes:
        seen: where it may let a key be seen.
        open: where it does for certain.
        dead: where a key is shut out by minus infinity; None for nowhere.
        lifted: where it opens what others shut; None for nowhere.
    """

    seen: ir.Value
    open: ir.Value
    dead: ir.Value | None
    lifted: ir.Value | None = None


def _any(op: Builder, value: ir.Value, axes: list[int], keepdims: int = 0) -> ir.Value:
    """Whether something is true along some axes."""
    if not axes:
        return value
    found = op.ReduceMax(op.cast(value, ir.DataType.INT32), axes, keepdims=keepdims)
    result: ir.Value = op.cast(found, ir.DataType.BOOL)
    return result


def counting(program: Program, sets: Sets) -> Program:
    """A program of its own for how many tokens each set has, how short rows can be, what is read.

    Args:
        program: in which they are; it is left as it was.
        sets: at least one.
    """
    with Builder(program.graph, opset=program.opset, prefix="counts") as op:
        sizes = [op.Shape(each.places) for each in sets.made.values()]
        read = [
            size
            if each.mask is each.read
            else op.ReduceSum(op.cast(each.read, ir.DataType.INT64), [0], keepdims=1)
            for each, size in zip(sets.made.values(), sizes, strict=True)
        ]
        total = op.Concat(*sizes, *(sets.short_length(grid) for grid in sets.short), *read, axis=0)
    outputs = program.graph.outputs
    before = list(outputs)
    outputs.clear()
    outputs.append(total)
    counts = program.clone()
    outputs.clear()
    outputs.extend(before)
    counts.graph.outputs[0].metadata_props[ROLE] = Role.USER_OUTPUT.value
    clean(counts)
    inputs = counts.graph.inputs
    kept = [value for value in inputs if value.uses()]
    inputs.clear()
    inputs.extend(kept)
    counts.aliases = {}
    counts.import_domains()
    return counts

"""The rewrite: what works on each token alone gets those that are read, and no others.

A packed value has one row, and the tokens of its set as positions, in the order of the batch:
[B, S, H] becomes [1, T, H], and [B, heads, S, D] [1, heads, T, D]. So every operator stays what it
is, with the axes and the shapes that it has; only its inputs are others. Where row and position
are one axis, that becomes [T]. ``Dropout`` is told each token's number, and draws it the mask that
it has in the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.graph.check import check
from ortrain.graph.cost import Multiplications
from ortrain.passes.clean import clean
from ortrain.passes.tokens.demand import ALL, NONE, SHUT, Demands, Kept, Shown, demands
from ortrain.passes.tokens.frames import Frame, Grid
from ortrain.passes.tokens.tokenwise import Read, aligned
from ortrain.program import ROLE, TARGET, Program, Role

Set = frozenset[Kept]


@dataclass
class Packed:
    """A program that leaves tokens out.

    Attributes:
        program: the rewritten program, with the inputs and outputs of the original one.
        counts: gives, of inputs that it names as the program does, how many tokens each set has.
        symbols: the dimension of each count in the program.
        sets: the tokens of each, and of which rows and positions.
        shown: what is read of its outputs, as in :func:`demands`.
        partial: positions of the outputs that are zero for tokens which were left out.
    """

    program: Program
    counts: Program
    symbols: tuple[str, ...]
    sets: tuple[tuple[Set, Grid], ...]
    shown: Shown = "all"
    partial: tuple[int, ...] = ()

    @cached_property
    def cost(self) -> Multiplications:
        """Of the program."""
        return Multiplications(self.program.graph)


def packed(program: Program, shown: Shown = "all") -> Packed | None:
    """A program without the work on tokens that nobody reads; None where there is no such work.

    Args:
        program: forward, of which shapes are known; left as it is.
        shown: what is read of its outputs, as in :func:`demands`.
    """
    copy = program.clone()
    found = demands(copy, shown)
    if not any(found.packs(node) not in (ALL, NONE) and _is_work(node) for node in copy.graph):
        return None
    writer = _Writer(copy, found)
    partial = writer.run(shown)
    copy.graph.sort()
    copy.name_values()
    counts = _counting(copy, writer)
    clean(copy)
    copy.import_domains()
    check(copy.graph, "leaving out tokens")
    symbols = tuple(each.symbol for each in writer.sets.values())
    return Packed(copy, counts, symbols, tuple(writer.sets), shown, partial)


def _is_work(node: ir.Node) -> bool:
    """Whether it is worth to do it for fewer tokens, and so everything around it."""
    return node.op_type in ("MatMul", "Gemm")


def _counting(program: Program, writer: _Writer) -> Program:
    """A program of its own for the sizes of the sets."""
    with Builder(program.graph, opset=program.opset, prefix="counts") as op:
        sizes = [op.Shape(each.places) for each in writer.sets.values()]
        total = sizes[0] if len(sizes) == 1 else op.Concat(*sizes, axis=0)
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


@dataclass(frozen=True)
class _Set:
    """A set of tokens in the graph.

    Attributes:
        mask: bool [B * S].
        places: int64 [T], of its tokens in the batch.
        symbol: the name of T.
    """

    mask: ir.Value
    places: ir.Value
    symbol: str


class _Writer:
    """Rewrites one program, in place.

    Args:
        program: the program.
        found: what is read of its values.
    """

    def __init__(self, program: Program, found: Demands) -> None:
        self.program, self.found, self.frames = program, found, found.frames
        self.sets: dict[tuple[Set, Grid], _Set] = {}
        self._at: dict[ir.Value, Set] = {}  # packed values
        self._dims = {v: shapes.dims(v) for n in program.graph for v in n.outputs}
        self._known: dict[tuple[object, ...], ir.Value] = {}
        # What every set needs is put at the end of the graph, which is sorted at last.
        self._end = Builder(program.graph, opset=program.opset, prefix="tokens")

    def run(self, shown: Shown) -> tuple[int, ...]:
        """Goes through the nodes in order: each finds its inputs rewritten.

        Args:
            shown: what is read of its outputs.

        Returns:
            The positions of packed outputs, among those that the user gets.
        """
        for node in list(self.program.graph):
            wanted = self.found.packs(node)
            if wanted is None or wanted == NONE:
                self._read_whole(node)
            else:
                self._pack(node, wanted)
        outputs = self.program.graph.outputs
        users = self.program.outputs(Role.USER_OUTPUT, Role.LOSS)
        partial = tuple(i for i, value in enumerate(users) if value in self._at)
        for i, value in enumerate(outputs):
            if value in self._at:
                outputs[i] = self._shown(value, shown)
        return partial

    # -- nodes ---------------------------------------------------------------------------------

    def _read_whole(self, node: ir.Node) -> None:
        """Has a node read the whole batch, with zeros for the tokens that were left out."""
        for i, value in enumerate(node.inputs):
            if value is None or value not in self._at:
                continue
            if i == 0 and self._reads_position(node, value):
                return
            if self._reads_labelled(node):
                return
            node.replace_input_with(i, self._whole(value))

    def _reads_position(self, node: ir.Node, value: ir.Value) -> bool:
        """Has a node that reads one position of each row read nothing else."""
        place, axis = shapes.constant(node.inputs[1]), node.attributes.get("axis")
        frame = self.frames[value]
        if node.op_type != "Gather" or node.domain or place is None or axis is None:
            return False
        if frame.axes != (0, 1) or axis.as_int() != 1 or place.size != 1:
            return False
        chosen = frozenset({Kept("position", number=int(place.reshape(-1)[0]))})
        with Builder.before(node, opset=self.program.opset) as op:
            rows = self._tokens(op, value, frame, chosen)  # [1, B, ...]
            result = (
                op.Squeeze(rows, [0])
                if place.ndim == 0
                else op.Transpose(rows, perm=[1, 0, *range(2, len(self._dims[value] or ()))])
            )
        result.shape = node.outputs[0].shape
        self._replace(node, result)
        return True

    def _reads_labelled(self, node: ir.Node) -> bool:
        """Has a loss read the rows with a label, and these labels."""
        if (node.domain, node.op_type) != ("ortrain", "CrossEntropy"):
            return False
        logits, labels = node.inputs[:2]
        assert logits is not None
        assert labels is not None
        ignored = node.attributes.get("ignore_index")
        number = -100 if ignored is None else ignored.as_int()
        chosen = frozenset({Kept("labels", labels, number)})
        frame = self.frames[logits]
        with Builder.before(node, opset=self.program.opset) as op:
            node.replace_input_with(0, self._tokens(op, logits, frame, chosen))
            node.replace_input_with(1, self._tokens(op, labels, frame, chosen))
        for value in node.outputs[1:]:
            value.shape = node.inputs[0].shape if node.inputs[0] is not None else None
        return True

    def _pack(self, node: ir.Node, wanted: Set) -> None:
        """Has a node compute some tokens."""
        frame = next(self.frames[v] for v in node.outputs if self.found.of.get(v, NONE) != NONE)
        taken = self.found.reads[node]
        with Builder.before(node, opset=self.program.opset) as op:
            own = self._set(wanted, frame)
            for i, (value, how) in enumerate(zip(list(node.inputs), taken, strict=True)):
                if value is None or how is Read.WHOLE:
                    continue
                if how is Read.SPREAD:
                    node.replace_input_with(i, self._spread(op, value, node, frame, own))
                    continue
                axes = self._axes(value, node, frame)
                node.replace_input_with(i, self._tokens(op, value, Frame(frame.grid, axes), wanted))
            self._adjust(op, node, frame, own)
        for value in node.outputs:
            dims = self._dims[value]
            if dims is not None and value in self.frames:
                value.shape = ir.Shape(_packed_dims(dims, self.frames[value].axes, own.symbol))
                self._at[value] = wanted

    def _axes(self, value: ir.Value, node: ir.Node, frame: Frame) -> tuple[int, ...]:
        """Where an input has its tokens."""
        known = self.frames.get(value)
        if known is not None:
            return known.axes
        missing = len(self._dims[node.outputs[0]] or ()) - (shapes.rank(value) or 0)
        return tuple(a - missing for a in frame.axes)

    def _adjust(self, op: Builder, node: ir.Node, frame: Frame, own: _Set) -> None:
        """What a node says of sizes and of the numbers of tokens."""
        dims = self._dims[node.outputs[0]]
        assert dims is not None
        if node.op_type == "Reshape" and not node.domain:
            target = _packed_dims(dims, frame.axes, -1)
            node.replace_input_with(1, op.constant(target, ir.DataType.INT64))
            node.attributes.pop("allowzero", None)
        elif node.op_type == "Expand" and not node.domain:
            # To a size of 1 nothing is expanded.
            kept = [1 if a in frame.axes else d for a, d in enumerate(dims)]
            node.replace_input_with(1, op.constant(kept, ir.DataType.INT64))
        elif (node.domain, node.op_type) == ("ortrain", "Dropout"):
            behind = [d for d in dims[len(frame.axes) : -1] if isinstance(d, int)]
            index = own.places if frame.is_flat else op.Unsqueeze(own.places, [0])
            if behind:
                count = int(np.prod(behind))
                inner = np.arange(count, dtype=np.int64).reshape(behind)
                lead = list(range(len(frame.axes), len(frame.axes) + len(behind)))
                index = op.Add(op.Mul(op.Unsqueeze(index, lead), count), op.constant(inner))
            node.resize_inputs(3)
            node.replace_input_with(2, index)

    def _replace(self, node: ir.Node, result: ir.Value) -> None:
        value = node.outputs[0]
        ir.convenience.replace_all_uses_with(value, result, replace_graph_outputs=True)
        result.metadata_props.update(value.metadata_props)
        self._dims[result] = self._dims[value]
        name, value.name = value.name, None
        result.name = name
        self.program.graph.remove(node, safe=True)

    # -- values --------------------------------------------------------------------------------

    def _tokens(self, op: Builder, value: ir.Value, frame: Frame, wanted: Set) -> ir.Value:
        """A value at the tokens of a set."""
        at = self._at.get(value)
        if at == wanted:
            return value
        own = self._set(wanted, frame)
        if at is None:
            places = own.places
        else:
            key = ("within", at, wanted, frame.grid)
            places = self._once(key, lambda: self._within(at, wanted, frame))
        known = self._known.get(("tokens", value, wanted))
        if known is None:
            known = self._moved(op, "Pack", value, frame.axes, places)
            self._known["tokens", value, wanted] = known
            dims = self._dims.get(value) or shapes.dims(value)
            assert dims is not None
            known.shape = ir.Shape(_packed_dims(dims, frame.axes, own.symbol))
        return known

    def _whole(self, value: ir.Value) -> ir.Value:
        """A packed value in the whole batch, zero at the tokens that were left out."""
        known = self._known.get(("whole", value))
        if known is None:
            following = next(iter(value.uses())).node
            with Builder.before(following, opset=self.program.opset) as op:
                known = self._put_back(op, value)
            self._known["whole", value] = known
        return known

    def _put_back(self, op: Builder, value: ir.Value) -> ir.Value:
        frame = self.frames[value]
        own, sizes = self._set(self._at[value], frame), self._sizes(frame)
        whole = self._moved(op, "Unpack", value, frame.axes, own.places, sizes)
        whole.shape = ir.Shape(self._dims[value] or ())
        return whole

    def _shown(self, value: ir.Value, shown: Shown) -> ir.Value:
        """An output in the place of one that is packed.

        What nobody reads is a zero that is expanded, which PyTorch keeps as one number: logits of
        50,000 words are 200 MB for a thousand tokens.
        """
        dims = self._dims[value] or ()
        with self._end as op:
            if shown == "loss" and all(map(self._is_known, dims)):
                sizes = [self._dim(d) for d in dims]
                zero = op.constant(0, value.dtype)
                whole = op.Expand(zero, op.Concat(*sizes, axis=0))
                whole.shape = ir.Shape(dims)
            else:
                whole = self._put_back(op, value)
        for key in (ROLE, TARGET):
            if key in value.metadata_props:
                whole.metadata_props[key] = value.metadata_props.pop(key)
        value.name, whole.name = f"{value.name}/packed", value.name
        return whole

    def _moved(
        self, op: Builder, kind: str, value: ir.Value, axes: tuple[int, ...], *operands: ir.Value
    ) -> ir.Value:
        """``Pack`` or ``Unpack`` along any axes."""
        length = shapes.rank(value)
        assert length is not None
        if len(axes) == 1:
            lead = op.Unsqueeze(value, [0])
            result = op.node(kind, (lead, *operands), domain="ortrain")
            if kind == "Pack":
                flat: ir.Value = op.Squeeze(result, [0])
                return flat
            end = op.constant([-1], ir.DataType.INT64)
            sizes = end if length == 1 else op.Concat(end, op.Shape(value, start=1), axis=0)
            merged: ir.Value = op.Reshape(result, sizes)
            return merged
        order: list[int] = [*axes, *(a for a in range(length) if a not in axes)]
        straight = order == list(range(length))
        source = value if straight else op.Transpose(value, perm=order)
        result = op.node(kind, (source, *operands), domain="ortrain")
        if straight:
            moved: ir.Value = result
        else:
            moved = op.Transpose(result, perm=[order.index(a) for a in range(length)])
        return moved

    def _spread(
        self, op: Builder, value: ir.Value, node: ir.Node, frame: Frame, own: _Set
    ) -> ir.Value:
        """A value that is the same for all rows, or for all positions, for each token."""
        length = len(self._dims[node.outputs[0]] or ())
        here = aligned(value, length, frame.axes)
        missing = length - (shapes.rank(value) or 0)
        assert here is not None
        row, position = frame.axes
        by_row = here[0] != 1
        key = ("spread", value, own.symbol, row, position, missing)
        known = self._known.get(key)
        if known is not None:
            return known
        size = self._size(frame, 1)
        places = self._once(
            ("row" if by_row else "position", own.symbol, frame.grid),
            lambda: (self._end.Div if by_row else self._end.Mod)(own.places, size),
        )
        if by_row:
            result = op.Gather(value, places, axis=row - missing)
            # The tokens stand where the rows were; they belong where the positions are.
            if position >= missing:
                order = list(range(length - missing))
                a, b = row - missing, position - missing
                order[a], order[b] = order[b], order[a]
                result = op.Transpose(result, perm=order)
        else:
            result = op.Gather(value, places, axis=position - missing)
        self._known[key] = result
        return result

    # -- sets ----------------------------------------------------------------------------------

    def _once(self, key: tuple[object, ...], make: Callable[[], ir.Value]) -> ir.Value:
        """What is made at most once, of what is known at the start."""
        known = self._known.get(key)
        if known is None:
            with self._end:
                known = self._known[key] = make()
        return known

    def _size(self, frame: Frame, which: int) -> ir.Value:
        """The number of rows, or the length, int64 [1]."""
        return self._dim((frame.grid.rows, frame.grid.length)[which])

    def _is_known(self, dim: shapes.Dim) -> bool:
        """Whether a size is a number, or one of the inputs', or a product of those."""
        named = {d for v in self.program.graph.inputs for d in shapes.dims(v) or ()}
        return isinstance(dim, int) or (dim is not None and named.issuperset(dim.split("*")))

    def _dim(self, dim: shapes.Dim) -> ir.Value:
        """A size of the whole batch, int64 [1]."""

        def make() -> ir.Value:
            if isinstance(dim, int):
                return self._end.constant([dim], ir.DataType.INT64)
            if isinstance(dim, str) and "*" in dim:
                return self._end.Mul(*map(self._dim, dim.split("*")))
            for value in self.program.graph.inputs:
                dims = shapes.dims(value) or ()
                if dim in dims:
                    return self._end.dim(value, dims.index(dim))
            raise AssertionError("grids are those of inputs")

        return self._once(("size", dim), make)

    def _sizes(self, frame: Frame) -> ir.Value:
        """The number of rows and the length, int64 [2]."""
        parts = [self._size(frame, which) for which in (0, 1)]
        return self._once(("sizes", frame.grid), lambda: self._end.Concat(*parts, axis=0))

    def _set(self, wanted: Set, frame: Frame) -> _Set:
        known = self.sets.get((wanted, frame.grid))
        if known is None:
            with self._end as op:
                ordered = sorted(wanted, key=lambda k: (k.kind, k.number, k.value and k.value.name))
                masks = [self._mask(kept, frame) for kept in ordered]
                mask = masks[0]
                for other in masks[1:]:
                    mask = op.Or(mask, other)
                places = op.Squeeze(op.NonZero(mask), [0])
            symbol = f"tokens{len(self.sets)}"
            places.shape = ir.Shape([symbol])
            known = self.sets[wanted, frame.grid] = _Set(mask, places, symbol)
        return known

    def _within(self, at: Set, wanted: Set, frame: Frame) -> ir.Value:
        """The places of one set's tokens among those of a set that has them all."""
        op = self._end
        outer, inner = self._set(at, frame), self._set(wanted, frame)
        ranks = op.Sub(op.CumSum(op.cast(outer.mask, ir.DataType.INT64), np.int64(0)), 1)
        result: ir.Value = op.Gather(ranks, inner.places, axis=0)
        return result

    def _mask(self, kept: Kept, frame: Frame) -> ir.Value:
        """A set as bool [B * S]."""
        return self._once(("mask", kept, frame.grid), lambda: self._made(kept, frame))

    def _made(self, kept: Kept, frame: Frame) -> ir.Value:
        op, value = self._end, kept.value
        if kept.kind == "position":
            length = self._size(frame, 1)
            last = op.Squeeze(length, [0])
            place = op.constant(kept.number, ir.DataType.INT64)
            if kept.number < 0:
                place = op.Add(last, kept.number)
            chosen = op.Equal(op.Range(np.int64(0), last, np.int64(1)), place)
            return op.Reshape(op.Expand(chosen, self._sizes(frame)), [-1])
        assert value is not None
        if kept.kind == "labels":
            return op.Reshape(op.Not(op.Equal(value, kept.number)), [-1])
        return op.Reshape(_seen(op, kept), [-1])


def _seen(op: Builder, kept: Kept) -> ir.Value:
    """The keys [B, S] that a mask [B, S] or [B, ..., L, S] lets some query see, bool.

    A query that an additive mask shuts out from every key, by any number but minus infinity, has
    weights all the same: it sees what its numbers leave over.
    """
    mask = kept.value
    assert mask is not None
    if mask.dtype in shapes.FLOATING:
        seen = op.Greater(mask, op.constant(SHUT, mask.dtype))
        others = op.Greater(mask, op.constant(-np.inf, mask.dtype))
    else:
        seen, others = op.cast(mask, ir.DataType.BOOL), None
        seen = op.Not(seen) if kept.negated else seen
    if kept.lost or others is not None:
        alive = op.ReduceMax(op.cast(seen, ir.DataType.INT32), [-1], keepdims=1)
        lost = op.Equal(alive, 0)
        seen = op.Or(seen, lost if others is None else op.And(lost, others))
    between = list(range(1, len(mask.shape or ()) - 1))
    if not between:
        whole: ir.Value = seen
        return whole
    count = op.ReduceMax(op.cast(seen, ir.DataType.INT32), between, keepdims=0)
    result: ir.Value = op.cast(count, ir.DataType.BOOL)
    return result


def _packed_dims(
    dims: tuple[shapes.Dim, ...], axes: tuple[int, ...], count: str | int
) -> list[shapes.Dim]:
    """The sizes of a packed value."""
    result = list(dims)
    result[axes[0]] = 1
    result[axes[-1]] = count
    return result

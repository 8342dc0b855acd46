"""The rewrite: what works on each token alone gets those that are read, and no others.

A packed value has one row, and the tokens of its set as positions, in the order of the batch:
[B, S, H] becomes [1, T, H], and [B, heads, S, D] [1, heads, T, D]. So every operator stays what it
is, with the axes and the shapes that it has; only its inputs are others. Where row and position
are one axis, that becomes [T]. ``Dropout`` is told each token's number, and draws it the mask that
it has in the whole batch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.graph.check import check
from ortrain.graph.cost import Multiplications
from ortrain.passes.clean import clean
from ortrain.passes.tokens.demand import Demands, Shown, demands
from ortrain.passes.tokens.frames import Frame, Grid
from ortrain.passes.tokens.kept import Condition, Kept, Labels, Set
from ortrain.passes.tokens.places import Sets, Tokens, counting
from ortrain.passes.tokens.shortened import shortened
from ortrain.passes.tokens.tokenwise import Plan, Read, aligned
from ortrain.program import ROLE, TARGET, Program, Role, set_width


@dataclass
class Packed:
    """A program that leaves tokens out.

    Attributes:
        program: the rewritten program, with the inputs and outputs of the original one.
        counts: gives, of inputs that it names as the program does, how many tokens each set has,
            as far as which position rows are computed where they are whole otherwise, and how many
            of the tokens of each set are read.
        symbols: the dimension of each count in the program: of the sets, then of the rows.
        sets: the tokens of each, and of which rows and positions.
        short: the rows and positions of each that is cut short.
        shown: what is read of its outputs, as in :func:`demands`.
        partial: positions of the outputs that are zero for tokens which were left out.
    """

    program: Program
    counts: Program
    symbols: tuple[str, ...]
    sets: tuple[tuple[Set, Grid], ...]
    short: tuple[Grid, ...] = ()
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
    if not any(_is_work(node) for node in found.plans):
        return None
    writer = _Writer(copy, found, shown)
    partial = writer.run()
    copy.graph.sort()
    copy.name_values()
    counts = counting(copy, writer.sets)
    clean(copy)
    copy.import_domains()
    check(copy.graph, "leaving out tokens")
    sets = writer.sets
    symbols = (*(each.symbol for each in sets.made.values()), *sets.short.values())
    return Packed(copy, counts, symbols, tuple(sets.made), tuple(sets.short), shown, partial)


def _is_work(node: ir.Node) -> bool:
    """Whether it is worth to do it for fewer tokens, and so everything around it."""
    return node.op_type in ("MatMul", "Gemm", "Einsum")


class _Writer:
    """Rewrites one program, in place.

    Args:
        program: the program.
        found: what is read of its values.
        shown: what is read of its outputs.
    """

    def __init__(self, program: Program, found: Demands, shown: Shown) -> None:
        self.program, self.found, self.frames = program, found, found.frames
        self.only_loss = shown == "loss"
        # An output of tokens shows zeros at all places that are not read: none is computed then.
        seen = any(v.producer() in found.plans for v in program.graph.outputs)
        self.sets = Sets(program, rounded=self.only_loss or not seen)
        self._at: dict[ir.Value, Set] = {}  # packed values
        self._dims = {v: shapes.dims(v) for n in program.graph for v in n.outputs}
        self._short: dict[ir.Node, dict[Grid, Set]] = {}
        self._cut: set[ir.Value] = set()  # values of short rows
        self._known: dict[tuple[object, ...], ir.Value] = {}

    def run(self) -> tuple[int, ...]:
        """Goes through the nodes in order: each finds its inputs rewritten.

        Returns:
            The positions of packed outputs, among those that the user gets.
        """
        self._shorten()
        for node in list(self.program.graph):
            if node in self._short:
                self._cut_short(node, self._short[node])
            elif node in self.found.plans:
                self._pack(node, *self.found.plans[node])
            elif node in self.found.direct and node.inputs[0] in self._at:
                self._read(node, self.found.direct[node])
            else:
                self._read_whole(node)
        outputs = self.program.graph.outputs
        users = self.program.outputs(Role.USER_OUTPUT, Role.LOSS)
        # What is made of tokens that were left out, and is read by nobody, is not what it was.
        hidden = {v for v in outputs if v in self._at or v not in self.found.of}
        partial = tuple(i for i, value in enumerate(users) if value in hidden)
        for i, value in enumerate(outputs):
            if value in hidden:
                outputs[i] = self._shown(value)
        return partial

    # -- nodes ---------------------------------------------------------------------------------

    def _read_whole(self, node: ir.Node) -> None:
        """Has a node read the whole batch, with zeros for the tokens that were left out."""
        for i, value in enumerate(node.inputs):
            if value is not None and value in self._at:
                node.replace_input_with(i, self._whole(value))

    def _read(self, node: ir.Node, kept: Kept) -> None:
        """Has a node read some tokens of its first input, and nothing else."""
        value, chosen = node.inputs[0], frozenset({kept})
        assert value is not None
        frame = self.frames[value]
        if isinstance(kept, Labels):
            self._read_labelled(node, value, frame, chosen)
            return
        places = shapes.constant(node.inputs[1])
        with Builder.before(node, opset=self.program.opset) as op:
            rows = self._tokens(op, value, frame, chosen)  # [1, B, ...]
            result = (
                op.Squeeze(rows, [0])
                if places is not None and places.ndim == 0
                else op.Transpose(rows, perm=[1, 0, *range(2, len(self._dims[value] or ()))])
            )
        result.shape = node.outputs[0].shape
        self._replace(node, result)

    def _read_labelled(self, node: ir.Node, logits: ir.Value, frame: Frame, chosen: Set) -> None:
        """Has a loss read the rows with a label, and these labels."""
        labels = node.inputs[1]
        assert labels is not None
        with Builder.before(node, opset=self.program.opset) as op:
            node.replace_input_with(0, self._tokens(op, logits, frame, chosen))
            node.replace_input_with(1, self._tokens(op, labels, frame, chosen))
        for value in node.outputs[1:]:
            value.shape = node.inputs[0].shape if node.inputs[0] is not None else None

    def _pack(self, node: ir.Node, plan: Plan, wanted: Set) -> None:
        """Has a node compute some tokens."""
        own = self.sets.of(wanted, plan.frame.grid)
        with Builder.before(node, opset=self.program.opset) as op:
            for i, (value, how) in enumerate(zip(list(node.inputs), plan.reads, strict=True)):
                if value is None or how is Read.WHOLE:
                    continue
                if isinstance(how, Frame):
                    node.replace_input_with(i, self._tokens(op, value, how, wanted))
                else:
                    node.replace_input_with(i, self._spread(op, value, node, plan.frame, own))
            self._adjust(op, node, plan, own)
        for value in node.outputs:
            dims = self._dims[value]
            if dims is not None and value in self.frames:
                value.shape = ir.Shape(_packed_dims(dims, self.frames[value].axes, own.symbol))
                self._at[value] = wanted

    def _shorten(self) -> None:
        """Finds the attentions that are computed for the first positions of rows."""
        wanted: dict[Grid, Set] = {}
        mixed: dict[Grid, set[frozenset[Condition]]] = {}
        for short in shortened(self.program.graph, self.found):
            self._short.update(dict.fromkeys(short.nodes, short.sets))
            for grid, kept in short.sets.items():
                wanted[grid] = wanted.get(grid, frozenset()) | kept
                mixed.setdefault(grid, set()).add(short.conditions)
        for grid, kept in wanted.items():
            self.sets.shorten(kept, grid, mixed[grid])

    def _cut_short(self, node: ir.Node, grids: Collection[Grid]) -> None:
        """Has a node of an attention compute the first positions of rows."""
        dims = self._dims[node.outputs[0]] or ()
        with Builder.before(node, opset=self.program.opset) as op:
            for i, value in enumerate(node.inputs):
                if value is not None:
                    node.replace_input_with(i, self._first(op, value, grids))
            # Rows of scores: of the output of all, or of the scores themselves.
            asked = [grid for grid in grids if grid.length == dims[-2]]
            place = {"Attention": 5, "Dropout": 2}.get(node.op_type)
            if asked and place is not None:
                between = [d for d in dims[1:-2] if isinstance(d, int)]
                node.resize_inputs(place + 1)
                node.replace_input_with(place, self.sets.short_rows(asked[0], between))
        names = {grid.length: self.sets.short[grid] for grid in grids}
        for value in node.outputs:
            value.shape = ir.Shape([names.get(str(d), d) for d in self._dims[value] or ()])
            self._cut.add(value)

    def _first(self, op: Builder, value: ir.Value, grids: Collection[Grid]) -> ir.Value:
        """A value at the first positions of rows."""
        if value in self._cut:
            return value
        key = ("first", value, *grids)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._made_first(op, value, grids)
        return known

    def _made_first(self, op: Builder, value: ir.Value, grids: Collection[Grid]) -> ir.Value:
        dims, frame = self._dims.get(value) or shapes.dims(value) or (), None
        lengths = {grid.length: grid for grid in grids}
        axes = [a for a, dim in enumerate(dims) if dim in lengths]
        if value in self._at:
            frame = self.frames[value]
            if frame.grid in grids:
                result, axes = self._put_back(op, value, short=True), []
            else:
                result = self._whole(value)
        else:
            result = value
        if axes:
            ends = [self.sets.short_length(lengths[str(dims[a])]) for a in axes]
            last = ends[0] if len(ends) == 1 else op.Concat(*ends, axis=0)
            result = op.Slice(result, [0] * len(axes), last, axes)
            names = {grid.length: self.sets.short[grid] for grid in grids}
            result.shape = ir.Shape([names.get(str(d), d) for d in dims])
        return result

    def _adjust(self, op: Builder, node: ir.Node, plan: Plan, own: Tokens) -> None:
        """What a node says of sizes and of the numbers of tokens."""
        frame, dims = plan.frame, self._dims[node.outputs[0]]
        assert dims is not None
        if node.op_type == "Reshape" and not node.domain:
            target = _packed_dims(dims, frame.axes, -1)
            node.replace_input_with(1, op.constant(target, ir.DataType.INT64))
            node.attributes.pop("allowzero", None)
        elif node.op_type == "Expand" and not node.domain:
            # To a size of 1 nothing is expanded; what is the same for all tokens is, to each.
            sizes = [
                op.constant([1 if a in frame.axes else d], ir.DataType.INT64)
                for a, d in enumerate(dims)
            ]
            if plan.reads[0] is Read.WHOLE:
                sizes[frame.axes[-1]] = op.Shape(own.places)
            node.replace_input_with(1, op.Concat(*sizes, axis=0))
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
        own = self.sets.of(wanted, frame.grid)
        if at is not None:
            places = self.sets.within(at, wanted, frame.grid)
        elif value in self._cut and frame.grid in self.sets.short:
            places = self.sets.short_places(own, frame.grid)
        else:
            places = own.places
        known = self._known.get(("tokens", value, wanted))
        if known is None:
            known = self._moved(op, "Pack", value, frame.axes, (1, own.symbol), places)
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

    def _put_back(self, op: Builder, value: ir.Value, *, short: bool = False) -> ir.Value:
        """A packed value in the batch, as far as rows are computed where that is ``short``."""
        frame, sets = self.frames[value], self.sets
        grid, own = frame.grid, sets.of(self._at[value], frame.grid)
        length = sets.short[grid] if short else grid.length
        places = sets.short_places(own, grid) if short else own.places
        sizes = sets.short_sizes(grid) if short else sets.sizes(grid)
        whole = self._moved(op, "Unpack", value, frame.axes, (grid.rows, length), places, sizes)
        dims = self._dims[value] or ()
        whole.shape = ir.Shape([length if d == grid.length else d for d in dims])
        return whole

    def _shown(self, value: ir.Value) -> ir.Value:
        """An output in the place of one that is packed.

        What nobody reads is zeros, one for each row, which whoever runs the program expands: logits
        of 50,000 words are 200 MB for a thousand tokens.
        """
        dims = self._dims[value] or ()
        with self.sets.end as op:
            if self.only_loss and all(map(self.sets.is_known, dims)):
                width = dims[-1] if len(dims) > 1 else 1
                own = (*dims[:-1], 1) if isinstance(width, int) else dims
                zero = op.constant(0, value.dtype)
                whole = op.Expand(zero, op.Concat(*map(self.sets.dim, own), axis=0))
                whole.shape = ir.Shape(own)
                if own != dims and isinstance(width, int):
                    set_width(whole, width)
            elif value in self._at:
                whole = self._put_back(op, value)
            else:
                return value
        for key in (ROLE, TARGET):
            if key in value.metadata_props:
                whole.metadata_props[key] = value.metadata_props.pop(key)
        value.name, whole.name = f"{value.name}/packed", value.name
        return whole

    def _moved(
        self,
        op: Builder,
        kind: str,
        value: ir.Value,
        axes: tuple[int, ...],
        lead: tuple[shapes.Dim, shapes.Dim],
        *operands: ir.Value,
    ) -> ir.Value:
        """``Pack`` or ``Unpack`` along any axes.

        Args:
            op: that writes it.
            kind: which of them.
            value: that is moved.
            axes: where its tokens are.
            lead: the sizes of these axes in the result.
            operands: of the operator behind the value.
        """
        length, dims = shapes.rank(value), shapes.dims(value) or ()
        assert length is not None
        if len(axes) == 1:
            result = op.node(kind, (op.Unsqueeze(value, [0]), *operands), domain="ortrain")
            result.shape = ir.Shape((*lead, *dims[1:]))
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
        result.shape = ir.Shape((*lead, *(dims[a] for a in order[2:])))
        if straight:
            moved: ir.Value = result
        else:
            moved = op.Transpose(result, perm=[order.index(a) for a in range(length)])
        return moved

    def _spread(
        self, op: Builder, value: ir.Value, node: ir.Node, frame: Frame, own: Tokens
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
        size, end = self.sets.dim(frame.grid.length), self.sets.end
        places = self.sets.once(
            ("row" if by_row else "position", own.symbol, frame.grid),
            lambda: (end.Div if by_row else end.Mod)(own.places, size),
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


def _packed_dims(
    dims: tuple[shapes.Dim, ...], axes: tuple[int, ...], count: str | int
) -> list[shapes.Dim]:
    """The sizes of a packed value."""
    result = list(dims)
    result[axes[0]] = 1
    result[axes[-1]] = count
    return result

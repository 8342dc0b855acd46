"""In which pieces of memory an update runs: whole tensors, several as one, or row by row.

An update is a dozen passes over memory, and each node has a cost of its own. So small tensors are
updated as one, and a large one in rows that stay in the cache from the first pass to the last.
What is computed is the same in every form.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.graph.scan import Values, scan
from ortrain.ondevice.making.optim.base import Rule, States

# In elements. Below SMALL, a node's own cost is more than that of its pass; above LARGE, a tensor
# and the intermediate results do not stay in cache together. Rows of 1 MiB are large enough that
# onnxruntime gives each pass to several threads.
SMALL = 1 << 14
LARGE = 1 << 20
ROW = 1 << 18


@dataclass(frozen=True)
class Slot:
    """One parameter in an update.

    Attributes:
        name: of the parameter.
        parameter: float32, of any static shape.
        gradient: of the same shape.
        states: by kind; of the shape of :func:`state_shape`.
    """

    name: str
    parameter: ir.Value
    gradient: ir.Value
    states: Mapping[str, ir.Value]


@dataclass(frozen=True)
class Updated:
    """The next values of one parameter.

    Attributes:
        parameter: of the parameter's shape.
        states: by kind.
    """

    parameter: ir.Value
    states: Mapping[str, ir.Value]


def state_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a state of a parameter: its own, or the rows that it is updated in."""
    return _rows(math.prod(shape)) or tuple(shape)


def _rows(size: int) -> tuple[int, int] | None:
    """[rows, elements of a row] of a large tensor; None for what is updated whole."""
    if size <= LARGE:
        return None
    count = next((n for n in range(-(-size // ROW), size // SMALL + 1) if size % n == 0), None)
    return None if count is None else (count, size // count)


class Block(ABC):
    """Parameters of one group that are updated together.

    Args:
        op: emits the update.
        slots: the parameters.
    """

    def __init__(self, op: Builder, slots: Sequence[Slot]) -> None:
        self.op = op
        self.slots = slots
        self.gradient = self._joined([slot.gradient for slot in slots])

    @abstractmethod
    def _joined(self, values: Sequence[ir.Value]) -> ir.Value:
        """One value of each slot as the single one that the block works on."""

    @abstractmethod
    def update(self, rule: Rule, clip: ir.Value | None) -> list[Updated]:
        """The next values of each slot.

        Args:
            rule: of the group.
            clip: float32 [1], by which the gradient is multiplied first; None for nothing.
        """

    def squares(self) -> ir.Value:
        """The gradient's sum of squares, in 1-d parts."""
        return _squares(self.op, self.gradient)


class WholeBlock(Block):
    """One tensor as it is."""

    def _joined(self, values: Sequence[ir.Value]) -> ir.Value:
        (value,) = values
        return value

    def update(self, rule: Rule, clip: ir.Value | None) -> list[Updated]:
        """The next values of the slot, in as many passes as the rule has operators."""
        (slot,) = self.slots
        p, states = _whole(self.op, rule, clip, slot.parameter, self.gradient, slot.states)
        return [Updated(p, states)]


class SmallBlock(Block):
    """Small tensors one behind the other."""

    def _joined(self, values: Sequence[ir.Value]) -> ir.Value:
        flat = [v if shapes.rank(v) == 1 else self.op.Reshape(v, [-1]) for v in values]
        value: ir.Value = self.op.Concat(*flat, axis=0)
        value.shape = ir.Shape([sum(map(_size, values))])
        return value

    def update(self, rule: Rule, clip: ir.Value | None) -> list[Updated]:
        """The next values of each slot, cut out of those of the block."""
        states = {
            kind: self._joined([slot.states[kind] for slot in self.slots])
            for kind in self.slots[0].states
        }
        p = self._joined([slot.parameter for slot in self.slots])
        p, states = _whole(self.op, rule, clip, p, self.gradient, states)
        parts = {kind: self._split(state) for kind, state in states.items()}
        return [
            Updated(parameter, {kind: part[i] for kind, part in parts.items()})
            for i, parameter in enumerate(self._split(p))
        ]

    def _split(self, value: ir.Value) -> list[ir.Value]:
        likes = [slot.parameter for slot in self.slots]
        parts = self.op.Split(value, [_size(v) for v in likes], axis=0, outputs=len(likes))
        result = []
        for part, like in zip(_several(parts), likes, strict=True):
            if shapes.rank(like) != 1:
                part = self.op.Reshape(part, self.op.shape(like), allowzero=1)
            part.shape = like.shape
            result.append(part)
        return result


class RowBlock(Block):
    """A large tensor row by row, in a ``Scan``.

    States lie in rows for good: to give them the parameter's shape would cost a copy of each, which
    takes a quarter of the time of an update. A parameter has to have its shape, so what is to be
    subtracted from it comes out of the rows, and the subtraction is over the whole.
    """

    def _joined(self, values: Sequence[ir.Value]) -> ir.Value:
        (value,) = values
        return self.op.Reshape(value, _rows(_size(value)))

    def squares(self) -> ir.Value:
        """The gradient's sum of squares, in 1-d parts, row by row."""

        def step(op: Builder, _: Values, rows: Values) -> tuple[Values, Values]:
            return (), (_squares(op, *rows),)

        _, (parts,) = scan(self.op, step, [], [self.gradient])
        return self.op.Reshape(parts, [-1])

    def update(self, rule: Rule, clip: ir.Value | None) -> list[Updated]:
        """The next values of the slot: the states' from the rows, the parameter's from a pass."""
        (slot,) = self.slots
        op, kinds = self.op, list(slot.states)
        names = [f"{op.prefix}/{slot.name}/{name}" for name in ("p", "g", *kinds)]
        rows = [_row(self.gradient, name) for name in names]
        with op.subgraph(f"{slot.name}/row", rows) as body:
            p, g, *states = rows
            d, after = _direction(body, rule, clip, p, g, dict(zip(kinds, states, strict=True)))
            graph = body.returning(d, *after.values())
        operands = [self.gradient, *slot.states.values()]
        if p.uses():
            operands.insert(0, self._joined([slot.parameter]))
        else:
            graph.inputs.remove(p)
        results = op.node(
            "Scan", operands, outputs=1 + len(kinds), body=graph, num_scan_inputs=len(operands)
        )
        d, *updated = _several(results)
        for value, state in zip(updated, slot.states.values(), strict=True):
            value.type, value.shape = state.type, state.shape
        d = op.Reshape(d, op.shape(slot.parameter))
        d.type, d.shape = slot.parameter.type, slot.parameter.shape
        return [Updated(slot.parameter - d, dict(zip(kinds, updated, strict=True)))]


def blocks(op: Builder, slots: Sequence[Slot]) -> list[Block]:
    """Parameters of one group, in the forms that fit their sizes.

    Args:
        op: emits the update.
        slots: the parameters.
    """
    small = [slot for slot in slots if _size(slot.parameter) <= SMALL]
    result: list[Block] = [SmallBlock(op, small)] if small else []
    for slot in slots:
        size = _size(slot.parameter)
        if size > SMALL:
            by_rows = bool(slot.states) and _rows(size) is not None
            result.append((RowBlock if by_rows else WholeBlock)(op, [slot]))
    return result


def _direction(
    op: Builder,
    rule: Rule,
    clip: ir.Value | None,
    p: ir.Value,
    g: ir.Value,
    states: Mapping[str, ir.Value],
) -> tuple[ir.Value, States]:
    return rule.direction(op, p, g if clip is None else g * clip, dict(states))


def _whole(
    op: Builder,
    rule: Rule,
    clip: ir.Value | None,
    p: ir.Value,
    g: ir.Value,
    states: Mapping[str, ir.Value],
) -> tuple[ir.Value, States]:
    d, after = _direction(op, rule, clip, p, g, states)
    return p - d, after


def _squares(op: Builder, value: ir.Value) -> ir.Value:
    """The sum of squares in parts of at most SMALL elements: short sums round less than a long one.

    Not by ReduceSumSquare, which adds one element after the other: it takes longer than the two
    operators, and is off by 6e-5 at 2^18 elements.
    """
    size = _size(value)
    part = next((n for n in range(min(size, SMALL), 0, -1) if size % n == 0), 1)
    parts = op.Reshape(value * value, [size // part, part], allowzero=1)
    return op.ReduceSum(parts, [1], keepdims=0)


def _row(rows: ir.Value, name: str) -> ir.Value:
    shape = shapes.static(rows)
    assert shape is not None
    return ir.Value(name=name, type=rows.type, shape=ir.Shape(shape[1:]))


def _size(value: ir.Value) -> int:
    size = shapes.size(value)
    assert size is not None, value.name
    return size


def _several(results: ir.Value | tuple[ir.Value, ...]) -> tuple[ir.Value, ...]:
    return results if isinstance(results, tuple) else (results,)

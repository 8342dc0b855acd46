"""What the gradients of recurrent layers share: directions, layouts, and the way back in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ortrain.autodiff.registry import Gradient
from ortrain.graph.build import Builder
from ortrain.graph.scan import Step, Values, scan

_END = np.iinfo(np.int64).max


@dataclass
class Direction:
    """One direction of a layer, time first.

    Attributes:
        op: emits the backward.
        dtype: of everything but the lengths.
        backwards: the forward ran from the last step to the first.
        x: [T, B, I].
        y: [T, B, H].
        w: [gates * H, I].
        r: [gates * H, H].
        bias: [gates * H] of the input and of the recurrence, or None.
        p: weights of the peepholes, [3 * H], or None.
        length: of each sequence, [B], or None.
        h: hidden states before the first step, [B, H], or None for zeros.
        c: cells before the first step, likewise.
        dy: gradient of y, or None.
        dh: gradient of the last hidden states, [B, H], or None.
        dc: gradient of the last cells, [B, H], or None.
        zeros: [B, H].
        valid: whether a step is before the end of its sequence, [T, B, 1], or None.
        before: the hidden state before each step, [T, B, H].
    """

    op: Builder
    dtype: ir.DataType
    backwards: bool
    x: ir.Value
    y: ir.Value
    w: ir.Value
    r: ir.Value
    bias: tuple[ir.Value, ir.Value] | None
    p: ir.Value | None
    length: ir.Value | None
    h: ir.Value | None
    c: ir.Value | None
    dy: ir.Value | None
    dh: ir.Value | None
    dc: ir.Value | None

    def __post_init__(self) -> None:
        op = self.op
        self.zeros: ir.Value = op.Expand(op.constant(0, self.dtype), op.Shape(self.y, start=1))
        self.zeros.shape = None if self.y.shape is None else ir.Shape(self.y.shape[1:])
        first = op.Unsqueeze(self.h or self.zeros, [0])
        if not self.backwards:
            before = op.Concat(first, op.Slice(self.y, [0], [-1], [0]), axis=0)
        else:
            before = op.Concat(op.Slice(self.y, [1], [_END], [0]), first, axis=0)
        self.valid: ir.Value | None = None
        if self.length is not None:
            count = op.Squeeze(op.Shape(self.y, end=1), [0])
            steps = op.Unsqueeze(op.Range(np.int64(0), count, np.int64(1)), [1, 2])
            end = op.Unsqueeze(op.cast(self.length, ir.DataType.INT64), [1])
            self.valid = op.Less(steps, end)
            if self.backwards:  # each sequence begins at its own end
                before = op.Where(op.Equal(steps, op.Sub(end, 1)), first, before)
            if self.dy is not None:
                self.dy = self.where_valid(self.dy, 0.0)
        before.shape = self.y.shape
        self.before: ir.Value = before

    def where_valid(self, value: ir.Value, otherwise: float) -> ir.Value:
        """[T, B, ...] with a number past the end of the sequences."""
        if self.valid is None:
            return value
        result: ir.Value = self.op.Where(self.valid, value, otherwise)
        return result

    def past_end(self) -> list[ir.Value]:
        """1 past the end of a sequence and 0 before, [T, B, 1]; nothing where all are as long."""
        return [] if self.valid is None else [self.op.cast(self.op.Not(self.valid), self.dtype)]

    def shares(self) -> tuple[ir.Value, ir.Value]:
        """The input's and the hidden state's share of the gates, [T, B, gates * H]."""
        ours, theirs = self._products()
        if self.bias is None:
            return ours, theirs
        return self.op.Add(ours, self.bias[0]), self.op.Add(theirs, self.bias[1])

    def sums(self) -> ir.Value:
        """Both shares; the biases are added first, a pass over large tensors less."""
        sums: ir.Value = self.op.Add(*self._products())
        return sums if self.bias is None else self.op.Add(sums, self.op.Add(*self.bias))

    def _products(self) -> tuple[ir.Value, ir.Value]:
        op = self.op
        ours = op.MatMul(self.x, op.Transpose(self.w, perm=[1, 0]))
        return ours, op.MatMul(self.before, op.Transpose(self.r, perm=[1, 0]))

    def back(
        self, step: Step, states: Sequence[ir.Value | None], slices: Values
    ) -> tuple[list[ir.Value], list[ir.Value]]:
        """Runs a step against the direction, as :func:`~ortrain.graph.scan.scan` does.

        Args:
            step: its first state is dh, the gradient of the output at the step added.
            states: after the last step, None for zeros.
            slices: [T, ...] each.
        """
        given = [*slices] if self.dy is None else [self.dy, *slices]

        def whole(op: Builder, states: Values, slices: Values) -> tuple[Values, Values]:
            dh, *others = states
            if self.dy is not None:
                dy, *slices = slices
                dh = op.Add(dh, dy)
            return step(op, (dh, *others), slices)

        return scan(
            self.op, whole, [s or self.zeros for s in states], given, backwards=not self.backwards
        )


@dataclass
class Gradients:
    """What goes back out of one direction.

    Attributes:
        input: of the input's share of the gates, [T, B, gates * H].
        recurrent: of the hidden state's share, in parts along the gates, and with each the state
            [T, B, H] that the forward multiplies with its rows of R.
        h: of the hidden states before the first step, [B, H].
        c: of the cells before the first step, [B, H].
        p: of the peepholes' weights, [3 * H].
    """

    input: ir.Value
    recurrent: Sequence[tuple[ir.Value, ir.Value]]
    h: ir.Value
    c: ir.Value | None = None
    p: ir.Value | None = None


class Layer:
    """One node: takes its directions apart, and puts their gradients together.

    Args:
        g: what a rule sees of the node.
        direction: attribute of the node.
        layout: attribute of the node: 1 where the batch comes before the steps.
        x: and the further inputs of the node.
    """

    def __init__(
        self,
        g: Gradient,
        direction: str,
        layout: int,
        x: ir.Value,
        w: ir.Value,
        r: ir.Value,
        b: ir.Value | None,
        length: ir.Value | None,
        h: ir.Value | None,
        c: ir.Value | None = None,
        p: ir.Value | None = None,
    ) -> None:
        assert x.dtype is not None
        self.g, self.op, self.layout = g, g.op, layout
        self.count = 2 if direction == "bidirectional" else 1
        self.x = self._time_first(x)
        dy, dh, dc = [*g.dys, None, None][:3]
        self.directions = [
            Direction(
                op=self.op,
                dtype=x.dtype,
                backwards=direction == "reverse" or d == 1,
                x=self.x,
                y=self._of_output(g.output(0), d),
                w=self._part(w, 0, d),
                r=self._part(r, 0, d),
                bias=None if b is None else self._halves(self._part(b, 0, d)),
                p=p and self._part(p, 0, d),
                length=length,
                h=h and self._part(h, layout, d),
                c=c and self._part(c, layout, d),
                dy=dy and self._of_output(dy, d),
                dh=dh and self._part(dh, layout, d),
                dc=dc and self._part(dc, layout, d),
            )
            for d in range(self.count)
        ]

    def gradients(self, cell: Callable[[Direction], Gradients]) -> list[ir.Value | None]:
        """One gradient for each input of the node, None where none is wanted."""
        parts = [cell(d) for d in self.directions]
        made: dict[int, Callable[[], ir.Value]] = {
            0: lambda: self._input(parts),
            1: lambda: self._stacked([self._product(part.input, self.x) for part in parts]),
            2: lambda: self._stacked([self._recurrent(part) for part in parts]),
            3: lambda: self._stacked([self._bias(part) for part in parts]),
            5: lambda: self._stacked([part.h for part in parts], self.layout),
            6: lambda: self._stacked([part.c for part in parts], self.layout),
            7: lambda: self._stacked([part.p for part in parts]),
        }
        count = len(self.g.node.inputs)
        return [made[i]() if i in made and self.g.needs(i) else None for i in range(count)]

    def _input(self, parts: Sequence[Gradients]) -> ir.Value:
        pairs = zip(parts, self.directions, strict=True)
        first, *others = [self.op.MatMul(part.input, d.w) for part, d in pairs]
        return self._time_first(self.op.Add(first, *others) if others else first)

    def _recurrent(self, part: Gradients) -> ir.Value:
        products = [self._product(gradient, states) for gradient, states in part.recurrent]
        return products[0] if len(products) == 1 else self.op.Concat(*products, axis=0)

    def _bias(self, part: Gradients) -> ir.Value:
        sums: dict[ir.Value, ir.Value] = {}
        whole = [part.input, *(gradient for gradient, _ in part.recurrent)]
        for gradient in whole:  # of an LSTM the two are one
            if gradient not in sums:
                sums[gradient] = self.op.ReduceSum(gradient, [0, 1], keepdims=0)
        return self.op.Concat(*(sums[gradient] for gradient in whole), axis=0)

    def _product(self, gradient: ir.Value, factor: ir.Value) -> ir.Value:
        """[T, B, m] and [T, B, n] → [m, n], summed over steps and batch."""
        rows = self.op.Transpose(self.op.Flatten(gradient, axis=2), perm=[1, 0])
        return self.op.MatMul(rows, self.op.Flatten(factor, axis=2))

    def _time_first(self, value: ir.Value) -> ir.Value:
        """Between the node's layout and time first, either way."""
        return self.op.Transpose(value, perm=[1, 0, 2]) if self.layout else value

    def _of_output(self, value: ir.Value, d: int) -> ir.Value:
        return self._time_first(self._part(value, 2 if self.layout else 1, d))

    def _part(self, value: ir.Value, axis: int, d: int) -> ir.Value:
        """One direction's share, without the axis of the directions."""
        if self.count > 1:
            value = self.op.Slice(value, [d], [d + 1], [axis])
        return self.op.Squeeze(value, [axis])

    def _halves(self, value: ir.Value) -> tuple[ir.Value, ir.Value]:
        halves: tuple[ir.Value, ir.Value] = self.op.Split(value, num_outputs=2, outputs=2)
        return halves

    def _stacked(self, parts: Sequence[ir.Value | None], axis: int = 0) -> ir.Value:
        wide = [self.op.Unsqueeze(part, [axis]) for part in parts]
        return wide[0] if len(wide) == 1 else self.op.Concat(*wide, axis=axis)

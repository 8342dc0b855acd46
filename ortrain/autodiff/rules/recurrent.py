"""Recurrent layers.

The forward stays the operator that it was, and of its work only the output is kept: with the hidden
state before every step at hand, the gates of all steps are one matrix product. Of an LSTM the cells
are run through once more, without products. What a step backwards multiplies with is made
beforehand, for all steps at once, so that the loop over the steps (a ``Scan``) holds a matrix
product and a few multiplications. Gradients of weights and of the input are products over all steps.

Steps past the end of a sequence (``sequence_lens``) pass the gradients of the states on as they
are, and have none themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ortrain.autodiff.registry import Gradient, gradient
from ortrain.graph.build import Builder
from ortrain.graph.scan import scan

_END = np.iinfo(np.int64).max


@gradient("LSTM")
def lstm(
    g, x, w, r, b=None, sequence_lens=None, initial_h=None, initial_c=None, p=None, *,
    activation_alpha=None, activation_beta=None, activations=None, clip=None, direction="forward",
    hidden_size=None, input_forget=0, layout=0,
):  # fmt: skip
    """back over the steps: dh = dy + dz R, dc = dh * o * (1 - tanh(c)²) + dc * f, dz = (dc, dh, dc, dc) * the gates' slopes; dX = dz W, dW = dzᵀ X, dR = dzᵀ h"""
    _refuse(g, activations, ("sigmoid", "tanh", "tanh"), clip)
    if input_forget:
        g.unsupported("its input and forget gate are coupled (input_forget)")
    layer = Layer(g, direction, layout, x, w, r, b, sequence_lens, initial_h, initial_c, p)
    return layer.gradients(_lstm)


@gradient("GRU")
def gru(
    g, x, w, r, b=None, sequence_lens=None, initial_h=None, *, activation_alpha=None,
    activation_beta=None, activations=None, clip=None, direction="forward", hidden_size=None,
    layout=0, linear_before_reset=0,
):  # fmt: skip
    """back over the steps: dh = dy + dh * z + dz R, dz = dh * the gates' slopes; dX = dz W, dW = dzᵀ X, dR = dzᵀ h"""
    _refuse(g, activations, ("sigmoid", "tanh"), clip)
    layer = Layer(g, direction, layout, x, w, r, b, sequence_lens, initial_h)
    return layer.gradients(_gru_linear if linear_before_reset else _gru)


@gradient("RNN")
def rnn(
    g, x, w, r, b=None, sequence_lens=None, initial_h=None, *, activation_alpha=None,
    activation_beta=None, activations=["Tanh", "Tanh"], clip=None, direction="forward",  # noqa: B006
    hidden_size=None, layout=0,
):  # fmt: skip
    """back over the steps: dz = (dy + dz R) * slope(y); dX = dz W, dW = dzᵀ X, dR = dzᵀ h"""
    names = {name.lower() for name in activations[: 2 if direction == "bidirectional" else 1]}
    kind = names.pop()
    _refuse(g, [*names, kind], (kind,) if kind in _SLOPES else ("tanh",), clip)
    layer = Layer(g, direction, layout, x, w, r, b, sequence_lens, initial_h)
    return layer.gradients(lambda d: _rnn(d, _SLOPES[kind]))


def _refuse(g: Gradient, activations: Sequence[str] | None, known: Sequence[str], clip) -> None:
    """Refuses what changes a step: other activations, and gates that are clipped."""
    if any(name.lower() != known[i % len(known)] for i, name in enumerate(activations or ())):
        g.unsupported(f"its activations are {', '.join(activations or ())}")
    if clip:
        g.unsupported("it clips its gates (clip)")


@dataclass
class Direction:
    """One direction of a layer, time first.

    Attributes:
        op: emits the backward.
        backwards: the forward ran from the last step to the first.
        x: [T, B, I].
        y: [T, B, H], zero past the end of a sequence.
        w: [gates * H, I].
        r: [gates * H, H].
        bias: [gates * H] of the input and of the recurrence, or None.
        h: hidden states before the first step, [B, H], or None for zeros.
        c: cells before the first step, likewise.
        p: weights of the peepholes, [3 * H], or None.
        length: of each sequence, [B], or None.
        dy: [T, B, H] or None.
        dh: gradient of the last hidden states, [B, H], or None.
        dc: gradient of the last cells, [B, H], or None.
    """

    op: Builder
    backwards: bool
    x: ir.Value
    y: ir.Value
    w: ir.Value
    r: ir.Value
    bias: tuple[ir.Value, ir.Value] | None
    h: ir.Value | None
    c: ir.Value | None
    p: ir.Value | None
    length: ir.Value | None
    dy: ir.Value | None
    dh: ir.Value | None
    dc: ir.Value | None

    def __post_init__(self) -> None:
        op = self.op
        zero = op.constant(0, self.x.dtype)
        self.zeros = op.Expand(zero, op.Shape(self.y, start=1))
        self.valid = self.last = None
        if self.length is not None:
            steps = op.Range(np.int64(0), op.Squeeze(op.Shape(self.y, end=1), [0]), np.int64(1))
            end = op.Unsqueeze(op.cast(self.length, ir.DataType.INT64), [1])
            steps = op.Unsqueeze(steps, [1, 2])
            self.valid, self.last = op.Less(steps, end), op.Equal(steps, end - 1)
        self.before = self._before()
        if self.dy is not None:
            self.dy = self.where_valid(self.dy, zero)

    def _before(self) -> ir.Value:
        """The hidden state before each step, [T, B, H]."""
        op, first = self.op, self.zeros if self.h is None else self.h
        edge = op.Unsqueeze(first, [0])
        if not self.backwards:
            result = op.Concat(edge, op.Slice(self.y, [0], [-1], [0]), axis=0)
        elif self.last is None or self.h is None:
            result = op.Concat(op.Slice(self.y, [1], [_END], [0]), edge, axis=0)
        else:
            rest = op.Unsqueeze(self.zeros, [0])
            result = op.Concat(op.Slice(self.y, [1], [_END], [0]), rest, axis=0)
            result = op.Where(self.last, edge, result)
        result.shape = self.y.shape
        return result

    def where_valid(self, value: ir.Value, otherwise: ir.Value | float) -> ir.Value:
        """[T, B, ...] with another value past the end of the sequences."""
        return value if self.valid is None else self.op.Where(self.valid, value, otherwise)

    def of_input(self) -> ir.Value:
        """The input's share of the gates, [T, B, gates * H]."""
        share = self.op.MatMul(self.x, self.op.Transpose(self.w, perm=[1, 0]))
        return share if self.bias is None else share + self.bias[0]

    def of_state(self) -> ir.Value:
        """The hidden state's share of the gates, [T, B, gates * H]."""
        share = self.op.MatMul(self.before, self.op.Transpose(self.r, perm=[1, 0]))
        return share if self.bias is None else share + self.bias[1]

    def back(self, step, states: Sequence[ir.Value | None], slices: Sequence[ir.Value]):
        """Runs ``step(op, states, slices)`` against the direction, with dh first among the states.

        The step sees dh with the output's gradient added.
        """
        given = [*slices] if self.dy is None else [self.dy, *slices]

        def whole(op, states, slices):
            dh, *others = states
            if self.dy is not None:
                output, *slices = slices
                dh = dh + output
            return step(op, (dh, *others), slices)

        starts = [self.zeros if state is None else state for state in states]
        return scan(self.op, whole, starts, given, backwards=not self.backwards)


@dataclass
class Gradients:
    """What goes back out of one direction.

    Attributes:
        input: of the input's share of the gates, [T, B, gates * H].
        recurrent: pairs of a part of the gradient of the state's share, and what it is multiplied
            with in the forward, [T, B, H].
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
    """One node: takes its directions apart, and puts their gradients together."""

    def __init__(
        self, g: Gradient, direction, layout, x, w, r, b, length, h, c=None, p=None
    ) -> None:
        self.g, self.op, self.layout = g, g.op, layout
        self.count = 2 if direction == "bidirectional" else 1
        self.x, self.y = self._time_first(x), g.output(0)
        dys = [*g.dys, None, None]
        self.directions = []
        for d in range(self.count):
            bias = None
            if b is not None:
                bias = tuple(g.op.Split(self._part(b, 0, d), num_outputs=2, axis=0, outputs=2))
            self.directions.append(
                Direction(
                    g.op,
                    direction == "reverse" or d == 1,
                    self.x,
                    self._of_output(self.y, d),
                    self._part(w, 0, d),
                    self._part(r, 0, d),
                    bias,
                    self._of_state(h, d),
                    self._of_state(c, d),
                    None if p is None else self._part(p, 0, d),
                    length,
                    self._of_output(dys[0], d),
                    self._of_state(dys[1], d),
                    self._of_state(dys[2], d),
                )
            )

    def gradients(self, cell: Callable[[Direction], Gradients]) -> list[ir.Value | None]:
        """One gradient for each input of the node, None where none is wanted."""
        op, parts = self.op, [cell(d) for d in self.directions]
        found: dict[int, Callable[[], ir.Value]] = {
            0: lambda: self._time_first(self._input(parts)),
            1: lambda: self._stacked([_product(op, p.input, self.x) for p in parts]),
            2: lambda: self._stacked(
                [_joined(op, [_product(op, *pair) for pair in p.recurrent]) for p in parts]
            ),
            3: lambda: self._stacked([self._bias(p) for p in parts]),
            5: lambda: self._stacked([p.h for p in parts], self.layout),
            6: lambda: self._stacked([p.c for p in parts], self.layout),
            7: lambda: self._stacked([p.p for p in parts]),
        }
        given = len(self.g.node.inputs)
        return [found[i]() if i in found and self.g.needs(i) else None for i in range(given)]

    def _input(self, parts: Sequence[Gradients]) -> ir.Value:
        pairs = zip(parts, self.directions, strict=True)
        products = [self.op.MatMul(p.input, d.w) for p, d in pairs]
        return products[0] if len(products) == 1 else products[0] + products[1]

    def _bias(self, part: Gradients) -> ir.Value:
        sums = self.op.ReduceSum(part.input, [0, 1], keepdims=0)
        states = [gradient for gradient, _ in part.recurrent]
        if states == [part.input]:
            return self.op.Concat(sums, sums, axis=0)
        others = [self.op.ReduceSum(s, [0, 1], keepdims=0) for s in states]
        return self.op.Concat(sums, *others, axis=0)

    def _time_first(self, value: ir.Value) -> ir.Value:
        return self.op.Transpose(value, perm=[1, 0, 2]) if self.layout else value

    def _of_output(self, value: ir.Value | None, d: int) -> ir.Value | None:
        if value is None:
            return None
        return self._time_first(self._part(value, 2 if self.layout else 1, d))

    def _of_state(self, value: ir.Value | None, d: int) -> ir.Value | None:
        return None if value is None else self._part(value, self.layout, d)

    def _part(self, value: ir.Value, axis: int, d: int) -> ir.Value:
        """One direction's share, without the axis of the directions."""
        if self.count > 1:
            value = self.op.Slice(value, [d], [d + 1], [axis])
        return self.op.Squeeze(value, [axis])

    def _stacked(self, parts: Sequence[ir.Value | None], axis: int = 0) -> ir.Value:
        return _joined(self.op, [self.op.Unsqueeze(part, [axis]) for part in parts], axis)


def _joined(op: Builder, parts: Sequence[ir.Value], axis: int = 0) -> ir.Value:
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=axis)


def _product(op: Builder, gradient: ir.Value, factor: ir.Value) -> ir.Value:
    """[T, B, m] and [T, B, n] → [m, n], summed over steps and batch."""
    rows = op.Transpose(op.Flatten(gradient, axis=2), perm=[1, 0])
    return op.MatMul(rows, op.Flatten(factor, axis=2))


def _split(op: Builder, value: ir.Value, count: int) -> tuple[ir.Value, ...]:
    return tuple(op.Split(value, num_outputs=count, axis=-1, outputs=count))


def _lstm(d: Direction) -> Gradients:
    op = d.op
    z_i, z_o, z_f, z_g = _split(op, d.of_input() + d.of_state(), 4)
    g = op.Tanh(z_g)
    before, i, f = _cells(d, z_i, z_f, g)
    c = f * before + i * g
    t = op.Tanh(c)
    p_i, p_o, p_f = (None,) * 3 if d.p is None else _split(op, d.p, 3)
    o = op.Sigmoid(z_o if p_o is None else z_o + p_o * c)
    # Slopes of the gates, in what is multiplied with the gradient of the cell, or of the output.
    s_i, s_o, s_f, s_g = (
        g * i * (1 - i), t * o * (1 - o), before * f * (1 - f), i * (1 - g * g),
    )  # fmt: skip
    to_cell, keep = o * (1 - t * t), f
    if p_i is not None:
        to_cell, keep = to_cell + s_o * p_o, keep + s_i * p_i + s_f * p_f
    slopes = d.where_valid(op.Concat(s_i, s_o, s_f, s_g, axis=-1), 0.0)
    slices = [slopes, d.where_valid(to_cell, 0.0), d.where_valid(keep, 1.0)]
    if d.valid is not None:
        slices.append(op.cast(op.Not(d.valid), d.x.dtype))

    def step(op, states, slices):
        (dh, dc), (slopes, to_cell, keep, *past_end) = states, slices
        dc = dc + dh * to_cell
        dz = op.Concat(dc, dh, dc, dc, axis=-1) * slopes
        return (op.Gemm(dz, d.r, *(dh * hold for hold in past_end)), dc * keep), (dz,)

    (dh, dc), (dz,) = d.back(step, (d.dh, d.dc), slices)
    dp = None
    if d.p is not None:
        dz_i, dz_o, dz_f, _ = _split(op, dz, 4)
        parts = op.Concat(dz_i * before, dz_o * c, dz_f * before, axis=-1)
        dp = op.ReduceSum(parts, [0, 1], keepdims=0)
    return Gradients(dz, [(dz, d.before)], dh, dc, dp)


def _cells(
    d: Direction, z_i: ir.Value, z_f: ir.Value, g: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The cells before each step, the input gate and the forget gate, [T, B, H] each."""
    op, start = d.op, d.zeros if d.c is None else d.c
    if d.p is None:
        i, f = op.Sigmoid(z_i), op.Sigmoid(z_f)
        slices = [d.where_valid(i * g, 0.0), d.where_valid(f, 1.0)]

        def step(op, states, slices):
            (c,), (new, keep) = states, slices
            return (keep * c + new,), (c,)

        _, (before,) = scan(op, step, [start], slices, backwards=d.backwards)
        return before, i, f
    p_i, _, p_f = _split(op, d.p, 3)
    slices = [z_i, z_f, g, *([] if d.valid is None else [d.valid])]

    def step_with_peepholes(op, states, slices):
        (c,), (z_i, z_f, g, *valid) = states, slices
        new = op.Sigmoid(z_f + p_f * c) * c + op.Sigmoid(z_i + p_i * c) * g
        return (op.Where(*valid, new, c) if valid else new,), (c,)

    _, (before,) = scan(op, step_with_peepholes, [start], slices, backwards=d.backwards)
    return before, op.Sigmoid(z_i + p_i * before), op.Sigmoid(z_f + p_f * before)


def _gru_linear(d: Direction) -> Gradients:
    """The reset gate after the product with R, as torch has it."""
    op = d.op
    x_z, x_r, x_n = _split(op, d.of_input(), 3)
    h_z, h_r, h_n = _split(op, d.of_state(), 3)
    z, r = op.Sigmoid(x_z + h_z), op.Sigmoid(x_r + h_r)
    n = op.Tanh(x_n + r * h_n)
    s_n = (1 - z) * (1 - n * n)
    s_z, s_r = (d.before - n) * z * (1 - z), s_n * h_n * r * (1 - r)
    slopes = d.where_valid(op.Concat(s_z, s_r, s_n * r, axis=-1), 0.0)

    def step(op, states, slices):
        (dh,), (slopes, keep) = states, slices
        dz = op.Concat(dh, dh, dh, axis=-1) * slopes
        return (op.Gemm(dz, d.r, dh * keep),), (dz, dh)

    (dh,), (dz, dhs) = d.back(step, (d.dh,), [slopes, d.where_valid(z, 1.0)])
    dz_z, dz_r, _ = _split(op, dz, 3)
    into_n = dhs * d.where_valid(s_n, 0.0)
    return Gradients(op.Concat(dz_z, dz_r, into_n, axis=-1), [(dz, d.before)], dh)


def _gru(d: Direction) -> Gradients:
    """The reset gate before the product with R."""
    op = d.op
    r_z, r_r, r_n = op.Split(d.r, num_outputs=3, axis=0, outputs=3)
    into_gates = op.Concat(r_z, r_r, axis=0)
    x_z, x_r, x_n = _split(op, d.of_input(), 3)
    h_z, h_r, _ = _split(op, d.of_state(), 3)
    z, r = op.Sigmoid(x_z + h_z), op.Sigmoid(x_r + h_r)
    reset = r * d.before
    h_n = op.MatMul(reset, op.Transpose(r_n, perm=[1, 0]))
    if d.bias is not None:
        h_n = h_n + _split(op, d.bias[1], 3)[2]
    n = op.Tanh(x_n + h_n)
    s_z = d.where_valid((d.before - n) * z * (1 - z), 0.0)
    s_n = d.where_valid((1 - z) * (1 - n * n), 0.0)
    s_r = d.before * r * (1 - r)

    def step(op, states, slices):
        (dh,), (s_z, s_n, s_r, r, keep) = states, slices
        dz_n = dh * s_n
        d_reset = op.Gemm(dz_n, r_n)
        dz = op.Concat(dh * s_z, d_reset * s_r, axis=-1)
        return (op.Gemm(dz, into_gates, dh * keep + d_reset * r),), (dz, dz_n)

    slices = [s_z, s_n, s_r, r, d.where_valid(z, 1.0)]
    (dh,), (dz, dz_n) = d.back(step, (d.dh,), slices)
    return Gradients(op.Concat(dz, dz_n, axis=-1), [(dz, d.before), (dz_n, reset)], dh)


_SLOPES: dict[str, Callable[[Builder, ir.Value], ir.Value]] = {
    "tanh": lambda op, y: 1 - y * y,
    "relu": lambda op, y: op.cast(op.Greater(y, 0.0), y.dtype),
    "sigmoid": lambda op, y: y * (1 - y),
}


def _rnn(d: Direction, slope: Callable[[Builder, ir.Value], ir.Value]) -> Gradients:
    slices = [d.where_valid(slope(d.op, d.y), 0.0)]
    if d.valid is not None:
        slices.append(d.op.cast(d.op.Not(d.valid), d.x.dtype))

    def step(op, states, slices):
        (dh,), (slope, *past_end) = states, slices
        dz = dh * slope
        return (op.Gemm(dz, d.r, *(dh * hold for hold in past_end)),), (dz,)

    (dh,), (dz,) = d.back(step, (d.dh,), slices)
    return Gradients(dz, [(dz, d.before)], dh)

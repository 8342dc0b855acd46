"""Recurrent layers.

The forward stays the operator that it was, and of its work only the output is kept: with the hidden
state before every step at hand, the gates of all steps are one matrix product. Of an LSTM the cells
are run through once more, without products. What a step backwards multiplies with is made
beforehand, for all steps at once, so that the loop over the steps (a ``Scan``) holds a matrix
product and a few multiplications. Gradients of weights and input are products over all steps.

Steps past the end of a sequence (``sequence_lens``) have no gradient of their own and pass those of
the states on as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from ortrain.autodiff.recurrence import Direction, Gradients, Layer
from ortrain.autodiff.registry import Gradient, gradient
from ortrain.graph.build import Builder
from ortrain.graph.scan import scan


@gradient("LSTM", wide=True)
def lstm(
    g, x, w, r, b=None, sequence_lens=None, initial_h=None, initial_c=None, p=None, *,
    activation_alpha=None, activation_beta=None, activations=None, clip=None, direction="forward",
    hidden_size=None, input_forget=0, layout=0,
):  # fmt: skip
    """against the steps: dh = dy + dz R, dc = dh * o * (1 - tanh(c)²) + dc * f of the step after,
    dz = (dc, dh, dc, dc) * slopes of the gates; then dX = dz W, dW = dzᵀ X, dR = dzᵀ h"""
    _refuse(g, activations, ("sigmoid", "tanh", "tanh"), clip)
    if input_forget:
        g.unsupported("its input and forget gates are coupled (input_forget)")
    layer = Layer(g, direction, layout, x, w, r, b, sequence_lens, initial_h, initial_c, p)
    return layer.gradients(_lstm)


@gradient("GRU", wide=True)
def gru(
    g, x, w, r, b=None, sequence_lens=None, initial_h=None, *, activation_alpha=None,
    activation_beta=None, activations=None, clip=None, direction="forward", hidden_size=None,
    layout=0, linear_before_reset=0,
):  # fmt: skip
    """against the steps: dh = dy + dz R + dh * z of the step after, dz = dh * slopes of the gates;
    then dX = dz W, dW = dzᵀ X, dR = dzᵀ h"""
    _refuse(g, activations, ("sigmoid", "tanh"), clip)
    layer = Layer(g, direction, layout, x, w, r, b, sequence_lens, initial_h)
    return layer.gradients(_gru_linear_before_reset if linear_before_reset else _gru)


@gradient("RNN", wide=True)
def rnn(
    g, x, w, r, b=None, sequence_lens=None, initial_h=None, *, activation_alpha=None,
    activation_beta=None, activations=["Tanh", "Tanh"], clip=None, direction="forward",  # noqa: B006
    hidden_size=None, layout=0,
):  # fmt: skip
    """against the steps: dz = (dy + dz R) * slope(y); then dX = dz W, dW = dzᵀ X, dR = dzᵀ h"""
    kind = activations[0].lower()
    used = activations if direction == "bidirectional" else activations[:1]
    _refuse(g, used, (kind if kind in _SLOPES else "tanh",), clip)
    layer = Layer(g, direction, layout, x, w, r, b, sequence_lens, initial_h)
    return layer.gradients(lambda d: _rnn(d, _SLOPES[kind]))


def _refuse(g: Gradient, activations: Sequence[str] | None, known: Sequence[str], clip) -> None:
    """Refuses what makes other steps: further activations, and gates that are clipped."""
    if any(name.lower() != known[i % len(known)] for i, name in enumerate(activations or ())):
        g.unsupported(f"its activations are {', '.join(activations or ())}")
    if clip:
        g.unsupported("it clips its gates (clip)")


def _split(op: Builder, value: ir.Value, count: int) -> tuple[ir.Value, ...]:
    return op.Split(value, num_outputs=count, axis=-1, outputs=count)


def _lstm(d: Direction) -> Gradients:
    op = d.op
    z_i, z_o, z_f, z_g = _split(op, d.sums(), 4)
    g = op.Tanh(z_g)
    if d.p is None:
        i, f = op.Sigmoid(z_i), op.Sigmoid(z_f)
        new = i * g
        kept = _kept_cells(d, new, f)
    else:
        p_i, p_o, p_f = _split(op, d.p, 3)
        before = _cells_before(d, z_i, z_f, g, p_i, p_f)
        i, f = op.Sigmoid(z_i + p_i * before), op.Sigmoid(z_f + p_f * before)
        new, kept = i * g, f * before
    c = kept + new
    t, o = op.Tanh(c), op.Sigmoid(z_o if d.p is None else z_o + p_o * c)
    # Slopes of the gates, in what is multiplied with the gradient of the cell, or of y = o * t.
    s_i, s_o, s_f, s_g = new * (1 - i), d.y * (1 - o), kept * (1 - f), i * (1 - g * g)
    to_cell, keep = o * (1 - t * t), f
    if d.p is not None:
        to_cell, keep = to_cell + s_o * p_o, keep + s_i * p_i + s_f * p_f
    slopes = d.where_valid(op.Concat(s_i, s_o, s_f, s_g, axis=-1), 0.0)
    slices = [slopes, d.where_valid(to_cell, 0.0), d.where_valid(keep, 1.0), *d.past_end()]

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


def _kept_cells(d: Direction, new: ir.Value, f: ir.Value) -> ir.Value:
    """What each step keeps of the cells before it, [T, B, H]."""

    def step(op, states, slices):
        (c,), (new, keep) = states, slices
        kept = keep * c
        return (kept + new,), (kept,)

    slices = [d.where_valid(new, 0.0), d.where_valid(f, 1.0)]
    return scan(d.op, step, [d.c or d.zeros], slices, backwards=d.backwards)[1][0]


def _cells_before(d: Direction, z_i, z_f, g, p_i, p_f) -> ir.Value:
    """The cells before each step, [T, B, H], where peepholes make gates of them."""

    def step(op, states, slices):
        (c,), (z_i, z_f, g, *valid) = states, slices
        new = op.Sigmoid(z_f + p_f * c) * c + op.Sigmoid(z_i + p_i * c) * g
        return (op.Where(*valid, new, c) if valid else new,), (c,)

    slices = [z_i, z_f, g, *([] if d.valid is None else [d.valid])]
    return scan(d.op, step, [d.c or d.zeros], slices, backwards=d.backwards)[1][0]


def _gru_linear_before_reset(d: Direction) -> Gradients:
    """The reset gate acts on the product with R, as torch has it."""
    op = d.op
    (x_z, x_r, x_n), (h_z, h_r, h_n) = (_split(op, share, 3) for share in d.shares())
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
    dz_n = dhs * d.where_valid(s_n, 0.0)  # of the input's share, which the gate does not act on
    return Gradients(op.Concat(dz_z, dz_r, dz_n, axis=-1), [(dz, d.before)], dh)


def _gru(d: Direction) -> Gradients:
    """The reset gate acts on the state, before the product with R."""
    op = d.op
    r_z, r_r, r_n = op.Split(d.r, num_outputs=3, axis=0, outputs=3)
    into_gates = op.Concat(r_z, r_r, axis=0)
    (x_z, x_r, x_n), (h_z, h_r, _) = (_split(op, share, 3) for share in d.shares())
    z, r = op.Sigmoid(x_z + h_z), op.Sigmoid(x_r + h_r)
    reset = r * d.before
    z_n = x_n + op.MatMul(reset, op.Transpose(r_n, perm=[1, 0]))
    n = op.Tanh(z_n if d.bias is None else z_n + _split(op, d.bias[1], 3)[2])
    s_z = d.where_valid((d.before - n) * z * (1 - z), 0.0)
    s_n = d.where_valid((1 - z) * (1 - n * n), 0.0)
    s_r = d.before * r * (1 - r)

    def step(op, states, slices):
        (dh,), (s_z, s_n, s_r, r, keep) = states, slices
        dz_n = dh * s_n
        d_reset = op.Gemm(dz_n, r_n)
        dz = op.Concat(dh * s_z, d_reset * s_r, axis=-1)
        return (op.Gemm(dz, into_gates, dh * keep + d_reset * r),), (dz, dz_n)

    (dh,), (dz, dz_n) = d.back(step, (d.dh,), [s_z, s_n, s_r, r, d.where_valid(z, 1.0)])
    return Gradients(op.Concat(dz, dz_n, axis=-1), [(dz, d.before), (dz_n, reset)], dh)


_SLOPES: dict[str, Callable[[Builder, ir.Value], ir.Value]] = {
    "tanh": lambda op, y: 1 - y * y,
    "relu": lambda op, y: op.CastLike(op.Greater(y, 0.0), y),
    "sigmoid": lambda op, y: y * (1 - y),
}


def _rnn(d: Direction, slope: Callable[[Builder, ir.Value], ir.Value]) -> Gradients:
    def step(op, states, slices):
        (dh,), (slope, *past_end) = states, slices
        dz = dh * slope
        return (op.Gemm(dz, d.r, *(dh * hold for hold in past_end)),), (dz,)

    slices = [d.where_valid(slope(d.op, d.y), 0.0), *d.past_end()]
    (dh,), (dz,) = d.back(step, (d.dh,), slices)
    return Gradients(dz, [(dz, d.before)], dh)

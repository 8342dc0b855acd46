"""Recurrent layers, each an ONNX operator over all steps, and single steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from ortrain.capture.onnx.translations.base import Translator, aten, refuse, translation
from ortrain.graph import shapes

# ONNX's order of the gates in torch's.
_LSTM = (0, 3, 1, 2)  # input, output, forget, cell
_GRU = (1, 0, 2)  # update, reset, new
_RNN = (0,)


@translation(aten.lstm.input)
def lstm(
    op: Translator,
    input: ir.Value,
    hx: Sequence[ir.Value],
    params: Sequence[ir.Value],
    *options: Any,
    stream: int = 0,
) -> tuple[ir.Value, ...]:
    hidden, cell = (shapes.dims(value) for value in hx)
    if hidden is not None and cell is not None and hidden[2] != cell[2]:
        raise refuse(
            "an LSTM with proj_size",
            "ONNX's LSTM has no projection",
            "leave proj_size at 0 and put a Linear behind the LSTM, or leave this module to eager",
        )
    return _layers(op, "LSTM", _LSTM, input, hx, params, *options, stream=stream)


@translation(aten.gru.input)
def gru(
    op: Translator, input: ir.Value, hx: ir.Value, *rest: Any, stream: int = 0
) -> tuple[ir.Value, ...]:
    return _layers(op, "GRU", _GRU, input, [hx], *rest, stream=stream, linear_before_reset=1)


@translation(aten.rnn_tanh.input)
def rnn_tanh(
    op: Translator, input: ir.Value, hx: ir.Value, *rest: Any, stream: int = 0
) -> tuple[ir.Value, ...]:
    return _layers(op, "RNN", _RNN, input, [hx], *rest, stream=stream)


@translation(aten.rnn_relu.input)
def rnn_relu(
    op: Translator, input: ir.Value, hx: ir.Value, *rest: Any, stream: int = 0
) -> tuple[ir.Value, ...]:
    relus = ["Relu"] * (2 if rest[5] else 1)
    return _layers(op, "RNN", _RNN, input, [hx], *rest, stream=stream, activations=relus)


def _layers(
    op: Translator,
    op_type: str,
    order: Sequence[int],
    input: ir.Value,
    states: Sequence[ir.Value],
    params: Sequence[ir.Value],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    *,
    stream: int = 0,
    **attributes: Any,
) -> tuple[ir.Value, ...]:
    """A node for each layer; its output, the directions side by side, is the next one's input."""
    count, each = 2 if bidirectional else 1, 4 if has_biases else 2
    if bidirectional:
        attributes["direction"] = "bidirectional"
    width, known = -1, shapes.dims(states[0])
    if known is not None and isinstance(known[2], int):
        attributes["hidden_size"], width = known[2], count * known[2]
        _expect_rows(params, len(order) * known[2])
    value = op.Transpose(input, perm=[1, 0, 2]) if batch_first else input
    finals: list[list[ir.Value]] = []
    for layer in range(num_layers):
        first = layer * count
        own = [params[(first + d) * each : (first + d + 1) * each] for d in range(count)]
        kinds = [slice(0, 1), slice(1, 2), *[slice(2, 4)] * has_biases]  # W, R and both biases
        weights = [
            _joined(op, [op.Unsqueeze(_gates(op, p[kind], order), [0]) for p in own])
            for kind in kinds
        ]
        start = states
        if num_layers > 1:
            start = [op.Slice(state, [first], [first + count], [0]) for state in states]
        absent = [None] * (4 - len(weights))  # the bias, and the lengths of the sequences
        y, *last = op.node(
            op_type, [value, *weights, *absent, *start], outputs=1 + len(states), **attributes
        )
        finals.append(last)
        if bidirectional:
            value = op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, width])
        else:
            value = op.Squeeze(y, [1])
        if dropout > 0 and train and layer < num_layers - 1:
            value = op.ours(
                "Dropout", value, op.seed(), ratio=float(dropout), stream=stream + layer
            )
    if batch_first:
        value = op.Transpose(value, perm=[1, 0, 2])
    return value, *(_joined(op, values) for values in zip(*finals, strict=True))


def _expect_rows(params: Sequence[ir.Value], rows: int) -> None:
    """Raises where a weight or a bias is not for so many gates: a trace does not look at them."""
    for value in params:
        known = shapes.dims(value)
        if known and isinstance(known[0], int) and known[0] != rows:
            raise refuse(
                f"a recurrent layer with {known[0]} rows of gates",
                f"it has {rows} by the size of its state, and PyTorch raises",
                "give its weights the sizes of its state",
            )


def _gates(op: Translator, values: Sequence[ir.Value], order: Sequence[int]) -> ir.Value:
    """Weights or biases with the gates of each, along the first axis, in ONNX's order."""
    if len(order) == 1:
        return _joined(op, values)
    parts = []
    for value in values:
        gates = op.Split(value, num_outputs=len(order), axis=0, outputs=len(order))
        parts += [gates[i] for i in order]
    return op.Concat(*parts, axis=0)


def _joined(op: Translator, values: Sequence[ir.Value]) -> ir.Value:
    return values[0] if len(values) == 1 else op.Concat(*values, axis=0)


@translation(aten.lstm_cell.default)
def lstm_cell(
    op: Translator,
    input: ir.Value,
    hx: Sequence[ir.Value],
    w_ih: ir.Value,
    w_hh: ir.Value,
    b_ih: ir.Value | None = None,
    b_hh: ir.Value | None = None,
) -> tuple[ir.Value, ...]:
    h, c = hx
    sums = op.Gemm(h, w_hh, op.Gemm(input, w_ih, b_ih, transB=1), transB=1)
    sums = sums if b_hh is None else op.Add(sums, b_hh)
    i, f, g, o = op.Split(sums, num_outputs=4, axis=-1, outputs=4)
    new = op.Add(op.Mul(op.Sigmoid(f), c), op.Mul(op.Sigmoid(i), op.Tanh(g)))
    return op.Mul(op.Sigmoid(o), op.Tanh(new)), new


@translation(aten.gru_cell.default)
def gru_cell(
    op: Translator,
    input: ir.Value,
    hx: ir.Value,
    w_ih: ir.Value,
    w_hh: ir.Value,
    b_ih: ir.Value | None = None,
    b_hh: ir.Value | None = None,
) -> ir.Value:
    ours, theirs = op.Gemm(input, w_ih, b_ih, transB=1), op.Gemm(hx, w_hh, b_hh, transB=1)
    x_r, x_z, x_n = op.Split(ours, num_outputs=3, axis=-1, outputs=3)
    h_r, h_z, h_n = op.Split(theirs, num_outputs=3, axis=-1, outputs=3)
    r, z = op.Sigmoid(op.Add(x_r, h_r)), op.Sigmoid(op.Add(x_z, h_z))
    n = op.Tanh(op.Add(x_n, op.Mul(r, h_n)))
    return op.Add(n, op.Mul(z, op.Sub(hx, n)))


def _rnn_cell(activation: str) -> Callable[..., ir.Value]:
    def cell(
        op: Translator,
        input: ir.Value,
        hx: ir.Value,
        w_ih: ir.Value,
        w_hh: ir.Value,
        b_ih: ir.Value | None = None,
        b_hh: ir.Value | None = None,
    ) -> ir.Value:
        sums = op.Gemm(hx, w_hh, op.Gemm(input, w_ih, b_ih, transB=1), transB=1)
        return op.node(activation, [sums if b_hh is None else op.Add(sums, b_hh)])

    return cell


translation(aten.rnn_tanh_cell.default)(_rnn_cell("Tanh"))
translation(aten.rnn_relu_cell.default)(_rnn_cell("Relu"))

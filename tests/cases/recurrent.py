"""Recurrent layers."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from ortrain.testing import OpCase, normal

STEPS, BATCH, INPUT, HIDDEN = 4, 3, 2, 5
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
# ONNX's order of the gates → torch's
ORDER = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}


def reordered(kind, value):
    parts = value.chunk(GATES[kind])
    return torch.cat([parts[i] for i in ORDER[kind]])


def backwards(value, lengths):
    """Every sequence from its last step to its first; what is past its end stays there."""
    columns = [
        torch.cat([value[:n, i].flip(0), value[n:, i]]) for i, n in enumerate(lengths.tolist())
    ]
    return torch.stack(columns, 1)


def oracle(kind, outputs):
    """torch's layer, one direction at a time, on packed sequences."""

    def layer(
        X, W, R, B=None, sequence_lens=None, initial_h=None, initial_c=None,
        direction="forward", layout=0, activations=("Tanh",),
    ):  # fmt: skip
        x = X.transpose(0, 1) if layout else X
        steps, batch, features = x.shape
        lengths = torch.full((batch,), steps) if sequence_lens is None else sequence_lens
        lengths = lengths.to(torch.int64)
        options = {"nonlinearity": activations[0].lower()} if kind == "RNN" else {}
        torch_layer = getattr(nn, kind)(features, R.shape[2], **options).double()
        ys, finals = [], []
        for d in range(W.shape[0]):
            zeros = torch.zeros(batch, R.shape[2], dtype=x.dtype)
            bias = torch.zeros(2 * W.shape[1], dtype=x.dtype) if B is None else B[d]
            weights = {
                "weight_ih_l0": W[d], "weight_hh_l0": R[d],
                "bias_ih_l0": bias.chunk(2)[0], "bias_hh_l0": bias.chunk(2)[1],
            }  # fmt: skip
            weights = {name: reordered(kind, value) for name, value in weights.items()}
            states = [
                zeros if v is None else (v.transpose(0, 1) if layout else v)[d]
                for v in (initial_h, initial_c)[: 2 if kind == "LSTM" else 1]
            ]
            back = direction == "reverse" or d == 1
            packed = nn.utils.rnn.pack_padded_sequence(
                backwards(x, lengths) if back else x, lengths, enforce_sorted=False
            )
            start = tuple(s[None] for s in states)
            y, final = functional_call(
                torch_layer, weights, (packed, start if kind == "LSTM" else start[0])
            )
            y, _ = nn.utils.rnn.pad_packed_sequence(y, total_length=steps)
            ys.append(backwards(y, lengths) if back else y)
            finals.append(final if kind == "LSTM" else (final,))
        result = [torch.stack(ys, 1), *(torch.cat(s) for s in zip(*finals, strict=True))]
        if layout:
            result = [result[0].permute(2, 0, 1, 3), *(s.transpose(0, 1) for s in result[1:])]
        return result[:outputs]

    return layer


def layer(
    kind, note, absent=(), outputs=None, torch=oracle, runtime="", seed=0, **attributes
):  # fmt: skip
    count, gates = 2 if attributes.get("direction") == "bidirectional" else 1, GATES[kind]
    outputs = outputs or (3 if kind == "LSTM" else 2)
    batch_first = attributes.get("layout")
    state = (BATCH, count, HIDDEN) if batch_first else (count, BATCH, HIDDEN)
    inputs = {
        "X": normal(*((BATCH, STEPS) if batch_first else (STEPS, BATCH)), INPUT),
        "W": normal(count, gates * HIDDEN, INPUT, scale=0.5),
        "R": normal(count, gates * HIDDEN, HIDDEN, scale=0.5),
        "B": normal(count, 2 * gates * HIDDEN, scale=0.5),
        "sequence_lens": np.array([4, 1, 3], np.int32),
        "initial_h": normal(*state),
    }
    if kind == "LSTM":
        inputs |= {"initial_c": normal(*state), "P": normal(count, 3 * HIDDEN)}
    inputs = {name: None if name in absent else value for name, value in inputs.items()}
    if batch_first:
        runtime = "onnxruntime's CPU kernels have no layout 1"
    return OpCase(
        kind, inputs, {"hidden_size": HIDDEN, **attributes}, outputs=outputs, tolerance="sums",
        torch=torch and torch(kind, outputs), runtime=runtime, note=note, seed=seed,
    )  # fmt: skip


PLAIN = ("sequence_lens", "P")
STATES = ("initial_h", "initial_c")

CASES = [
    *(
        layer(kind, f"{direction}{'-lengths' * lengths}", ("P",) if lengths else PLAIN,
              direction=direction, **attributes)
        for kind, attributes in (("LSTM", {}), ("GRU", {"linear_before_reset": 1}), ("RNN", {}))
        for direction in ("forward", "reverse", "bidirectional")
        for lengths in (False, True)
    ),
    *(
        layer(kind, note, (*PLAIN, *absent), outputs=outputs, **attributes)
        for kind, attributes in (("LSTM", {}), ("GRU", {"linear_before_reset": 1}), ("RNN", {}))
        for note, absent, outputs in (("no-bias", ("B",), None), ("no-states", STATES, None),
                                      ("nothing", ("B", *STATES), None), ("output", (), 1))
    ),
    *(
        layer(kind, "batch-first", ("P",), layout=1, direction="bidirectional", **attributes)
        for kind, attributes in (("LSTM", {}), ("GRU", {"linear_before_reset": 1}), ("RNN", {}))
    ),
    layer("LSTM", "no-cell", (*PLAIN, "initial_c")),
    layer("LSTM", "peepholes", ("sequence_lens",), torch=None),
    layer("LSTM", "peepholes-lengths", ("initial_c",), torch=None, direction="bidirectional"),
    layer("GRU", "reset-first", PLAIN, torch=None),
    layer("GRU", "reset-first-no-bias", (*PLAIN, "B", *STATES), torch=None),
    layer("GRU", "reset-first-lengths", torch=None, direction="bidirectional"),
    layer("RNN", "relu", PLAIN, activations=["Relu"], seed=1),  # nothing close to where it bends
    layer("RNN", "sigmoid", ("initial_h",), torch=None, activations=["Sigmoid"]),
]  # fmt: skip

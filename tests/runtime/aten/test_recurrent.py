"""Recurrent layers in the forms that no gradient asks for, in halves, and on their own lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ortrain.runtime.aten import AtenExecutor
from ortrain.runtime.aten.refusals import missing
from ortrain.runtime.onnxruntime import OnnxRuntimeExecutor
from tests.programs import program

STEPS, BATCH, INPUT, HIDDEN = 5, 3, 4, 6
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
FUNCTIONS = {"LSTM": 3, "GRU": 2, "RNN": 1}


def layer(kind, *, directions=1, lengths=True, dtype=np.float32, dtypes=None, **attributes):
    """A program of a layer with all inputs and outputs, and what to feed it."""
    gates, rng = GATES[kind], np.random.default_rng(0)
    shapes = {
        "x": (STEPS, BATCH, INPUT),
        "w": (directions, gates * HIDDEN, INPUT),
        "r": (directions, gates * HIDDEN, HIDDEN),
        "b": (directions, 2 * gates * HIDDEN),
        "h": (directions, BATCH, HIDDEN),
    }
    if kind == "LSTM":
        shapes |= {"c": (directions, BATCH, HIDDEN), "p": (directions, 3 * HIDDEN)}
    feeds = {n: (rng.standard_normal(s) * 0.3).astype(dtype) for n, s in shapes.items()}
    if lengths:
        shapes["lengths"], feeds["lengths"] = (BATCH,), np.array([5, 1, 3], np.int32)
    if directions == 2:
        attributes["direction"] = "bidirectional"

    def body(op, x, w, r, b, h, c=None, p=None, lengths=None):
        rest = (c, p) if kind == "LSTM" else ()
        outputs = 3 if kind == "LSTM" else 2
        made = op.node(
            kind, [x, w, r, b, lengths, h, *rest], outputs=outputs, hidden_size=HIDDEN, **attributes
        )
        return dict(zip(("y", "y_h", "y_c"), made, strict=False))

    return program(body, shapes, dtype=dtype, dtypes={"lengths": np.int32}), feeds


def results(executor, subject, feeds):
    compiled = executor.compile(executor.lower(subject))
    return compiled.run([feeds[name] for name in compiled.input_names])


def agrees(kind, **form):
    subject, feeds = layer(kind, **form)
    expected = results(OnnxRuntimeExecutor(threads=1), subject, feeds)
    for result, wanted in zip(results(AtenExecutor(), subject, feeds), expected, strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("kind", ["GRU", "RNN"])
def test_gates_may_be_clipped(kind, directions):
    agrees(kind, directions=directions, clip=0.3)


@pytest.mark.parametrize("lengths", [False, True])
def test_the_forget_gate_may_follow_from_the_input_gate(lengths):
    agrees("LSTM", input_forget=1, lengths=lengths)


@pytest.mark.parametrize(
    ("activation", "alpha", "beta"),
    [
        ("Relu", [], []), ("Tanh", [], []), ("Sigmoid", [], []), ("Softsign", [], []),
        ("Softplus", [], []), ("LeakyRelu", [0.1], []), ("LeakyRelu", [], []),
        ("ThresholdedRelu", [0.4], []), ("ScaledTanh", [0.7], [1.2]), ("HardSigmoid", [0.3], [0.4]),
        ("HardSigmoid", [], []), ("Elu", [0.6], []), ("Affine", [0.7], [0.1]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", GATES)
def test_gates_may_have_any_activation(kind, activation, alpha, beta):
    gates = ["Sigmoid"] * (kind == "LSTM")  # whose cells would outgrow float32 in few steps
    count = FUNCTIONS[kind] - len(gates)
    attributes = {"activations": [*gates, *[activation] * count]}
    attributes |= {"activation_alpha": alpha * count} if alpha else {}
    attributes |= {"activation_beta": beta * count} if beta else {}
    agrees(kind, **attributes)


def test_each_direction_has_its_own_activations():
    functions = ["Sigmoid", "Tanh", "Softsign", "HardSigmoid", "Tanh", "Tanh"]
    agrees("LSTM", directions=2, activations=functions)
    agrees("GRU", directions=2, activations=["Sigmoid", "Relu", "HardSigmoid", "Tanh"])
    agrees("RNN", directions=2, activations=["Relu", "Tanh"])


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("kind", ["GRU", "RNN"])
def test_a_plain_layer_is_one_call(kind, directions):
    form = {"linear_before_reset": 1} if kind == "GRU" else {}
    form |= {"directions": directions, "lengths": False}
    agrees(kind, **form)
    executor = AtenExecutor()
    source = executor.compile(executor.lower(layer(kind, **form)[0])).source
    assert "recurrent.fused(" in source


@pytest.mark.parametrize(
    ("kind", "attributes"),
    [
        ("RNN", {"activations": ["Affine"]}),
        ("RNN", {"activations": ["Odd"]}),
        ("LSTM", {"clip": 0.1}),
    ],
)
def test_a_form_that_nobody_has_said_the_meaning_of_has_no_kernel(kind, attributes):
    subject, _ = layer(kind, **attributes)
    assert missing(AtenExecutor().lower(subject)) == [kind]


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", GATES)
def test_layers_in_half_precision_come_close(kind, dtype, lengths):
    form = {"linear_before_reset": 1} if kind == "GRU" else {}
    subject, feeds = layer(kind, lengths=lengths, **form)
    exact = results(AtenExecutor(), subject, feeds)
    executor = AtenExecutor()
    compiled = executor.compile(executor.lower(subject))
    halves = [torch.from_numpy(feeds[n]) for n in compiled.input_names]
    halves = [h.to(dtype) if h.is_floating_point() else h for h in halves]
    for result, wanted in zip(compiled.run_values(halves), exact, strict=True):
        assert result.dtype is dtype
        np.testing.assert_allclose(result.float().numpy(), wanted, atol=0.1)

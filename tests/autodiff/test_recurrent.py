"""Gradients of recurrent layers beyond the tables: what is kept, what is refused, and the cut."""

from __future__ import annotations

import numpy as np
import pytest

from ortrain.autodiff import differentiate
from ortrain.autodiff.partition import partition
from ortrain.errors import NoGradientRule, UnsupportedGradient
from ortrain.program import Phase, Role, phase_of
from tests.programs import program, run

SHAPES = {"x": ("steps", "batch", 2), "w": (1, 12, 2), "r": (1, 12, 3)}


def lstm(op, x, w, r):
    y, _, c = op.LSTM(op.Tanh(x), op.Mul(w, 0.5), op.Mul(r, 0.5), outputs=3)
    return op.Concat(op.Squeeze(y, [1]), c, axis=0)


def feeds():
    generator = np.random.default_rng(0)
    sizes = {"x": (4, 2, 2), "w": (1, 12, 2), "r": (1, 12, 3), "y.gradient": (5, 2, 3)}
    return {name: generator.standard_normal(s).astype(np.float32) for name, s in sizes.items()}


def test_the_forward_keeps_its_operator_and_of_its_work_the_output_and_sizes():
    whole = differentiate(program(lstm, SHAPES), ["x", "w", "r"])
    forward, _ = partition(whole)
    assert forward.operators()["LSTM"] == 1
    assert "Scan" not in forward.operators()
    kept = sorted(v.producer().op_type for v in forward.outputs(Role.SAVED))
    assert kept == ["LSTM", "Shape", "Tanh"]


@pytest.mark.parametrize("pieces", [1, 3, 100])
def test_the_parts_of_a_backward_with_loops_compute_what_the_whole_does(pieces):
    whole = differentiate(program(lstm, SHAPES), ["x", "w", "r"])
    expected, text, known = run(whole, feeds()), whole.text(), feeds()
    for part in partition(whole, pieces):
        known |= run(part, {value.name: known[value.name] for value in part.graph.inputs})
    assert whole.text() == text
    for value in whole.graph.outputs:
        np.testing.assert_allclose(known[value.name], expected[value.name], rtol=1e-6)


def test_a_part_reads_its_own_values_in_its_loops():
    """What the body of a loop reads from outside is the part's, not that of the whole."""
    parts = partition(differentiate(program(lstm, SHAPES), ["x", "w", "r"]), 100)
    for part in parts:
        own = {*part.graph.inputs, *part.graph.initializers.values()}
        own |= {value for node in part.graph.all_nodes() for value in node.outputs}
        for node in part.graph.all_nodes():
            body = node.attributes.get("body")
            own |= set(body.as_graph().inputs) if body is not None else set()
        for node in part.graph.all_nodes():
            assert all(value is None or value in own for value in node.inputs)


def test_steps_of_the_backward_carry_its_phase():
    whole = differentiate(program(lstm, SHAPES), ["x"])
    inner = [n for n in whole.graph.all_nodes() if n.graph is not whole.graph]
    assert inner
    assert {phase_of(node) for node in inner} == {Phase.BACKWARD}


def test_an_output_that_is_absent_is_asked_for():
    """With the last state alone, the node gets the output of every step for its backward."""

    def last(op, x, w, r):
        node = op.LSTM(x, w, r, outputs=2)[0].producer()
        node.outputs[0].name = ""
        return node.outputs[1]

    def named(op, x, w, r):
        return op.LSTM(x, w, r, outputs=2)[1]

    known = {**feeds(), "y.gradient": feeds()["y.gradient"][:1]}
    results = [
        run(differentiate(program(f, SHAPES), ["x", "w", "r"]), known) for f in (last, named)
    ]
    for name in ("x.gradient", "w.gradient", "r.gradient"):
        np.testing.assert_array_equal(results[0][name], results[1][name])


@pytest.mark.parametrize(
    ("operator", "gates", "attributes", "reason"),
    [
        ("LSTM", 4, {"clip": 1.0}, "it clips its gates"),
        ("LSTM", 4, {"input_forget": 1}, "input and forget gates are coupled"),
        ("LSTM", 4, {"activations": ["Sigmoid", "Tanh", "Relu"]}, "activations are Sigmoid, Tanh"),
        ("GRU", 3, {"activations": ["HardSigmoid", "Tanh"]}, "activations are HardSigmoid, Tanh"),
        ("RNN", 1, {"activations": ["Affine"]}, "activations are Affine"),
    ],
)
def test_a_form_without_a_gradient_is_refused_by_name(operator, gates, attributes, reason):
    def layer(op, x, w, r):
        return op.node(operator, [x, w, r], **attributes)

    shapes = {"x": (4, 2, 2), "w": (1, gates * 3, 2), "r": (1, gates * 3, 3)}
    with pytest.raises(UnsupportedGradient, match=reason):
        differentiate(program(layer, shapes), ["w"])


def test_activations_may_be_named_in_any_case():
    def layer(op, x, w, r):
        return op.LSTM(x, w, r, activations=["sigmoid", "TANH", "tanh"])

    assert differentiate(program(layer, SHAPES), ["w"]).outputs(Role.GRADIENT)


def test_a_second_derivative_is_refused():
    once = differentiate(program(lstm, SHAPES), ["x"])
    with pytest.raises(NoGradientRule, match="Scan"):
        differentiate(once, ["x"], ["x.gradient"])

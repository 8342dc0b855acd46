"""Loops in either direction, on every executor."""

from __future__ import annotations

import numpy as np
import pytest

from ortrain.graph import shapes
from ortrain.graph.scan import scan
from ortrain.runtime.onnxruntime import OnnxRuntimeExecutor
from tests.programs import program, run

FEEDS = {
    "x": np.arange(12, dtype=np.float32).reshape(4, 3),
    "start": np.array([1, 2, 3], np.float32),
    "factor": np.array([0.5, 1, 2], np.float32),
}


def build(step, backwards):
    def body(op, x, start, factor):
        def whole(inner, states, slices):
            return step(inner, states[0], slices[0], factor)

        (last,), collected = scan(op, whole, [start], [x], backwards=backwards)
        return {"last": last, **{f"y{i}": value for i, value in enumerate(collected)}}

    return program(body, {"x": ("t", 3), "start": (3,), "factor": (3,)})


def on_onnxruntime(subject):
    executor = OnnxRuntimeExecutor(threads=1)
    compiled = executor.compile(executor.lower(subject))
    values = compiled.run([FEEDS[name] for name in compiled.input_names])
    return dict(zip(compiled.output_names, values, strict=True))


@pytest.mark.parametrize("backwards", [False, True])
def test_each_step_sees_the_state_of_the_one_before_and_what_is_outside(backwards):
    def step(op, state, x, factor):
        new = op.Add(op.Mul(state, factor), x)
        return (new,), (new, state)

    state, rows = FEEDS["start"], {}
    for t in range(4)[:: -1 if backwards else 1]:
        before, state = state, state * FEEDS["factor"] + FEEDS["x"][t]
        rows[t] = (state, before)
    expected = {
        "last": state,
        **{f"y{i}": np.stack([rows[t][i] for t in range(4)]) for i in range(2)},
    }
    subject = build(step, backwards)
    for results in (run(subject, FEEDS), on_onnxruntime(subject)):
        for name, value in expected.items():
            np.testing.assert_allclose(results[name], value, rtol=1e-6)


def test_dtypes_and_shapes_are_known():
    subject = build(lambda op, state, x, factor: ((op.Add(state, x),), (op.Exp(x),)), False)
    known = {value.name: shapes.dims(value) for value in subject.graph.outputs}
    assert known == {"last": (3,), "y0": ("t", 3)}

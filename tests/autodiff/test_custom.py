"""Gradients that the user's program has written out: they are taken as they stand."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir import DataType

from ortrain.autodiff import differentiate
from ortrain.program import Phase, phase_of
from tests.programs import program, run


def squared(op, x, y):
    """Results x² and x + y; the gradients of x and y are 3·x·d₀ + d₁ and sin(d₁)."""
    results = [op.node("StopGradient", [v], domain="ortrain") for v in (op.Mul(x, x), op.Add(x, y))]
    d = [
        op.node("Upstream", [v], domain="ortrain", number=7, index=i) for i, v in enumerate(results)
    ]
    given = [op.Add(op.Mul(op.Mul(d[0], x), op.constant(3.0, x.dtype)), d[1]), op.Sin(d[1])]
    return op.node(
        "CustomGradient",
        [*results, x, y, *given],
        domain="ortrain",
        outputs=2,
        number=7,
        results=2,
        inputs=2,
    )


def both(op, x, y):
    """Of other numbers than the arguments."""
    first, second = squared(op, op.Exp(x), y)
    return {"first": first, "second": second}


X, Y = (np.random.default_rng(i).standard_normal((2, 3)).astype(np.float32) for i in range(2))
SUBJECT = program(both, {"x": (2, 3), "y": (2, 3)})


def test_they_are_computed_of_what_arrives() -> None:
    d = [np.full((2, 3), value, np.float32) for value in (0.5, 0.25)]
    training = differentiate(SUBJECT, ["x", "y"])
    feeds = {"x": X, "y": Y, "first.gradient": d[0], "second.gradient": d[1]}
    found = run(training, feeds)
    e = np.exp(X)
    np.testing.assert_allclose(found["first"], e * e, rtol=1e-6)
    np.testing.assert_allclose(found["x.gradient"], (3 * e * d[0] + d[1]) * e, rtol=1e-5)
    np.testing.assert_allclose(found["y.gradient"], np.sin(d[1]), rtol=1e-6)


def test_a_result_that_nothing_arrives_at_counts_as_zero() -> None:
    training = differentiate(SUBJECT, ["x", "y"], ["first"])
    found = run(training, {"x": X, "y": Y, "first.gradient": np.ones((2, 3), np.float32)})
    np.testing.assert_allclose(found["x.gradient"], 3 * np.exp(2 * X), rtol=1e-5)
    np.testing.assert_array_equal(found["y.gradient"], 0)


def test_they_are_no_part_of_the_forward() -> None:
    training = differentiate(SUBJECT, ["x"])
    counts = training.operators()
    assert counts["ortrain::CustomGradient"] == 0
    backward = [n for n in training.graph if phase_of(n) is Phase.BACKWARD]
    assert not any(n.op_type == "Upstream" for n in backward)


def test_the_forward_alone_gives_the_results() -> None:
    found = run(SUBJECT, {"x": X, "y": Y})
    np.testing.assert_allclose(found["first"], np.exp(2 * X), rtol=1e-6)
    np.testing.assert_allclose(found["second"], np.exp(X) + Y, rtol=1e-6)


@pytest.mark.parametrize("dtype", [DataType.FLOAT16, DataType.BFLOAT16])
def test_narrow_gradients_stay_narrow(dtype: ir.DataType) -> None:
    subject = program(both, {"x": (2, 3), "y": (2, 3)}, dtype=dtype.numpy())
    training = differentiate(subject, ["x", "y"])
    assert {v.dtype for v in training.graph.outputs} == {dtype}

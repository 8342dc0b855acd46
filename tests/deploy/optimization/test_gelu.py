"""GELUs become one operator, with the bias before them, or stay for a reason."""

from __future__ import annotations

import numpy as np
import pytest

from tests.deploy.optimization.graphs import answers, assert_same, draw, fused, graph, operators

WEIGHTS = (
    "float[16] bias, float half = {0.5}, float one = {1.0}, float root = {1.4142135}, "
    "float inverse = {0.70710677}, float pi = {0.7978845608}, float cube = {0.044715}, "
    "float three = {3.0}, float alpha = {1.702}, float wrong = {1.5}, float[3,16] table"
)
SIGNATURE = "(float[batch,seq,16] x) => (float[batch,seq,16] y)"
CURVE = "d = Div(x, root) e = Erf(d) c = Add(e, one)"
TANH = "k = Pow(x, three) l = Mul(k, cube) i = Add(x, l) j = Mul(i, pi) h = Tanh(j) c = Add(h, one)"
EXACT = {
    "half last": f"{CURVE} m = Mul(x, c) y = Mul(m, half)",
    "half first": f"{CURVE} m = Mul(x, half) y = Mul(m, c)",
    "half of the curve": f"{CURVE} m = Mul(half, c) y = Mul(x, m)",
    "an inverse root": """d = Mul(inverse, x) e = Erf(d) c = Add(one, e) m = Mul(c, x)
        y = Mul(half, m)""",
}
FAST = {
    "a power": f"{TANH} m = Mul(x, half) y = Mul(m, c)",
    "a product": TANH.replace("k = Pow(x, three)", "q = Mul(x, x) k = Mul(x, q)")
    + " m = Mul(half, c) y = Mul(m, x)",
    "the operator": """y = Gelu<approximate="tanh">(x)""",
}
QUICK = {
    "a factor": "i = Mul(x, alpha) s = Sigmoid(i) y = Mul(x, s)",
    "none": "s = Sigmoid(x) y = Mul(s, x)",
}
FEEDS = ({"x": draw(2, 3, 16) * 3}, {"x": np.linspace(-8, 8, 16, dtype=np.float32)[None, None]})


@pytest.mark.parametrize(
    ("name", "body"),
    [
        *(("Gelu", body) for body in EXACT.values()),
        *(("FastGelu", body) for body in FAST.values()),
        *(("QuickGelu", body) for body in QUICK.values()),
    ],
)
def test_each_form_becomes_one_operator(name: str, body: str) -> None:
    before = graph(SIGNATURE, body, WEIGHTS)
    after, report = fused(before)
    assert report.fused == {name: 1}
    assert operators(after) == {name: 1}
    assert_same(before, after, *FEEDS, atol=3e-6)
    _, report = fused(before, disable_gelu_fusion=True)
    assert not report.fused


NEVER = {
    "another root": EXACT["half last"].replace("root", "wrong"),
    "another factor": EXACT["half last"].replace("(m, half)", "(m, wrong)"),
    "another argument": EXACT["half last"].replace("Mul(x, c)", "Mul(d, c)"),
    "another cube": FAST["a power"].replace("(k, cube)", "(k, half)"),
    "another power": FAST["a power"].replace("three)", "alpha)"),
    "another sigmoid": "a = Abs(x) s = Sigmoid(a) y = Mul(x, s)",
}


@pytest.mark.parametrize("case", NEVER)
def test_other_curves_stay(case: str) -> None:
    before = graph(SIGNATURE, NEVER[case], WEIGHTS)
    after, report = fused(before)
    assert not report.fused
    assert_same(before, after, {"x": np.abs(FEEDS[0]["x"])})


@pytest.mark.parametrize("sides", ["x, bias", "bias, x"])
@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("BiasGelu", EXACT["half first"]),
        ("BiasGelu", "y = Gelu(x)"),
        ("FastGelu", FAST["a power"]),
    ],
)
def test_a_bias_goes_in(sides: str, name: str, body: str) -> None:
    inner = body.replace("(x", "(z").replace(", x)", ", z)")
    before = graph(SIGNATURE, f"z = Add({sides}) {inner}", WEIGHTS)
    after, report = fused(before, optimize_for_gpu=True)
    assert +report.fused == {name: 1}
    assert operators(after) == {name: 1}
    assert_same(before, after, *FEEDS, atol=3e-6)


def test_a_processor_adds_the_bias_where_onnxruntime_leaves_it() -> None:
    before = graph(SIGNATURE, "z = Add(x, bias) y = Gelu(z)", WEIGHTS)
    after, report = fused(before)
    assert report.fused == {"Sum": 1}
    assert operators(after) == {"Sum": 1, "Gelu": 1}
    np.testing.assert_array_equal(answers(before, FEEDS[0])[0], answers(after, FEEDS[0])[0])
    _, report = fused(before, disable_bias_gelu_fusion=True)
    assert not report.fused


def test_a_sum_that_others_read_stays() -> None:
    signature = SIGNATURE.replace("y)", "y, float[batch,seq,16] z)")
    before = graph(signature, "z = Add(x, bias) y = Gelu(z)", WEIGHTS)
    _, report = fused(before, optimize_for_gpu=True)
    assert not report.fused
    assert report.refused[0][2] == "the sum is read elsewhere"


def test_a_table_is_no_bias() -> None:
    signature = "(float[batch,3,16] x) => (float[batch,3,16] y)"
    before = graph(signature, "z = Add(x, table) y = Gelu(z)", WEIGHTS)
    _, report = fused(before, optimize_for_gpu=True)
    assert not report.fused
    assert "vector" in report.refused[0][2]


def test_the_approximation_is_made_where_it_is_asked_for_alone() -> None:
    for body in (EXACT["half last"], "y = Gelu(x)", "z = Add(x, bias) y = Gelu(z)"):
        before = graph(SIGNATURE, body, WEIGHTS)
        after, _ = fused(before)
        assert "FastGelu" not in operators(after)
        after, report = fused(before, enable_gelu_approximation=True)
        assert report.fused["FastGelu"] == operators(after)["FastGelu"] == 1
        assert_same(before, after, *FEEDS, atol=6e-4)


def test_doubles_stay() -> None:
    body = EXACT["half last"]
    weights = WEIGHTS.replace("float ", "double ")
    signature = SIGNATURE.replace("float", "double")
    _, report = fused(graph(signature, body, weights))
    assert not report.fused
    assert "DOUBLE" in report.refused[0][2]

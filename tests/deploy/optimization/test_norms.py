"""Norms become one operator, with the sum before them, or stay for a reason."""

from __future__ import annotations

import numpy as np
import pytest

from tests.deploy.optimization.graphs import answers, assert_same, draw, fused, graph, operators

WEIGHTS = (
    "float[16] g, float[16] b, float[16] bias, float two = {2.0}, float half = {0.5}, "
    "float epsilon = {1e-6}, float one = {1.0}, float minus = {-0.5}, int64[1] last = {-1}, "
    "int64[1] middle = {1}, float[1,16] wide, float[4] other"
)
ALONE = "(float[batch,seq,16] x) => (float[batch,seq,16] y)"
CENTRED = "m = ReduceMean(x, last) d = Sub(x, m)"
LAYER = {
    "a power and a quotient": CENTRED + """ s = Pow(d, two) v = ReduceMean(s, last)
        w = Add(v, epsilon) r = Sqrt(w) n = Div(d, r) t = Mul(n, g) y = Add(t, b)""",
    "a square and a reciprocal": CENTRED + """ s = Mul(d, d) v = ReduceMean(s, last)
        w = Add(epsilon, v) r = Sqrt(w) i = Reciprocal(r) n = Mul(i, d) t = Mul(g, n)
        y = Add(b, t)""",
    "no offset": CENTRED + """ s = Mul(d, d) v = ReduceMean(s, last) w = Add(v, epsilon)
        r = Sqrt(w) n = Div(d, r) y = Mul(n, g)""",
}  # fmt: skip
RMS = {
    "a power and a reciprocal": """s = Pow(x, two) v = ReduceMean(s, last) w = Add(v, epsilon)
        r = Sqrt(w) i = Reciprocal(r) n = Mul(x, i) y = Mul(g, n)""",
    "a quotient": """s = Mul(x, x) v = ReduceMean(s, last) w = Add(v, epsilon) r = Sqrt(w)
        n = Div(x, r) y = Mul(n, g)""",
    "one over a root": """s = Mul(x, x) v = ReduceMean(s, last) w = Add(v, epsilon) r = Sqrt(w)
        i = Div(one, r) n = Mul(i, x) y = Mul(n, g)""",
    "a power of minus a half": """s = Mul(x, x) v = ReduceMean(s, last) w = Add(v, epsilon)
        i = Pow(w, minus) n = Mul(i, x) y = Mul(n, g)""",
    "a scale that is computed": """h = Add(g, one) s = Mul(x, x) v = ReduceMean(s, last)
        w = Add(v, epsilon) r = Sqrt(w) n = Div(x, r) y = Mul(n, h)""",
}  # fmt: skip


@pytest.mark.parametrize("form", LAYER)
def test_a_spelled_out_layer_norm_becomes_one_operator(form: str) -> None:
    before = graph(ALONE, LAYER[form], WEIGHTS, 18)
    after, report = fused(before)
    assert report.fused == {"LayerNormalization": 1}
    assert operators(after) == {"LayerNormalization": 1}
    assert_same(before, after, {"x": draw(2, 3, 16)}, {"x": draw(1, 1, 16) * 1e-4})


@pytest.mark.parametrize("form", RMS)
def test_a_spelled_out_rms_norm_becomes_one_operator(form: str) -> None:
    before = graph(ALONE, RMS[form], WEIGHTS, 18)
    after, report = fused(before)
    assert report.fused == {"SimplifiedLayerNormalization": 1}
    assert_same(before, after, {"x": draw(2, 3, 16)}, {"x": draw(1, 1, 16) * 1e-4})


NEVER = {
    "over another axis": LAYER["no offset"].replace(", last)", ", middle)"),
    "of another square": LAYER["no offset"].replace("Mul(d, d)", "Mul(d, x)"),
    "without a root": LAYER["no offset"].replace("Sqrt(w)", "Abs(w)"),
    "of a cube": RMS["a power and a reciprocal"].replace("Pow(x, two)", "Pow(x, one)"),
    "with a sum": RMS["a quotient"].replace("ReduceMean", "ReduceSum"),
}  # fmt: skip


@pytest.mark.parametrize("case", NEVER)
def test_what_is_no_norm_stays(case: str) -> None:
    before = graph(ALONE, NEVER[case], WEIGHTS, 18)
    after, report = fused(before)
    assert not report.fused
    assert operators(after)["ReduceMean"] + operators(after)["ReduceSum"]
    assert_same(before, after, {"x": draw(2, 16, 16)})


def test_what_is_centred_on_another_value_is_an_rms_norm_of_the_difference() -> None:
    body = LAYER["no offset"].replace("m = ReduceMean(x", "z = Abs(x) m = ReduceMean(z")
    before = graph(ALONE, body, WEIGHTS, 18)
    after, report = fused(before)
    assert report.fused == {"SimplifiedLayerNormalization": 1}
    assert_same(before, after, {"x": draw(2, 3, 16)})


def test_a_scale_that_is_no_vector_stays_behind_the_norm() -> None:
    body = RMS["a quotient"].replace("Mul(n, g)", "Mul(n, wide)")
    before = graph(ALONE, body, WEIGHTS, 18)
    after, report = fused(before)
    assert report.fused == {"SimplifiedLayerNormalization": 1}
    assert operators(after)["Mul"] == 1
    assert_same(before, after, {"x": draw(2, 3, 16)})


def test_an_old_opset_keeps_its_layer_norms() -> None:
    body = LAYER["no offset"].replace("(x, last)", "<axes=[-1]>(x)")
    body = body.replace("(s, last)", "<axes=[-1]>(s)")
    _, report = fused(graph(ALONE, body, WEIGHTS, 14))
    assert not report.fused
    assert report.refused[0][2] == "opset 14 has no LayerNormalization"


@pytest.mark.parametrize("body", [LAYER["no offset"], RMS["a quotient"]])
def test_a_norm_needs_no_scale(body: str) -> None:
    before = graph(ALONE, body.replace("n = Div", "y = Div").partition("y = Mul")[0], WEIGHTS, 18)
    after, report = fused(before)
    assert report.fused.total() == operators(after).total() == 1
    assert_same(before, after, {"x": draw(2, 3, 16)})


@pytest.mark.parametrize("option", ["disable_layer_norm_fusion"])
def test_norms_stay_where_that_is_asked_for(option: str) -> None:
    for body in (LAYER["no offset"], RMS["a quotient"]):
        _, report = fused(graph(ALONE, body, WEIGHTS, 18), **{option: True})
        assert not report.fused


GPU = {"optimize_for_gpu": True}
TWO = "(float[batch,seq,16] x, float[batch,seq,16] z) => (float[batch,seq,16] y)"
NORMS = {
    "SkipLayerNormalization": "y = LayerNormalization<axis=-1, epsilon=1e-6>(t, g, b)",
    "SkipSimplifiedLayerNormalization": (
        "y = SimplifiedLayerNormalization<axis=-1, epsilon=1e-6>(t, g)"
    ),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_sum_goes_into_the_norm_of_it(name: str) -> None:
    before = graph(TWO, f"t = Add(x, z) {NORMS[name]}", WEIGHTS)
    after, report = fused(before, **GPU)
    assert report.fused == {name: 1}
    assert operators(after) == {name: 1}
    for shape in ((1, 1, 16), (3, 5, 16)):
        assert_same(before, after, {"x": draw(*shape), "z": draw(*shape, seed=1)})


@pytest.mark.parametrize("name", NORMS)
def test_the_sum_comes_out_of_the_norm_where_others_read_it(name: str) -> None:
    signature = TWO.replace("y)", "y, float[batch,seq,16] w)")
    before = graph(signature, f"t = Add(x, z) {NORMS[name]} w = Mul(t, two)", WEIGHTS)
    after, report = fused(before, **GPU)
    assert report.fused == {name: 1}
    assert operators(after) == {name: 1, "Mul": 1}
    assert_same(before, after, {"x": draw(2, 3, 16), "z": draw(2, 3, 16, seed=1)})
    before = graph(
        TWO.replace("y)", "y, float[batch,seq,16] t)"), f"t = Add(x, z) {NORMS[name]}", WEIGHTS
    )
    after, report = fused(before, **GPU)
    assert operators(after) == {name: 1}
    assert [v.name for v in after.graph.outputs] == ["y", "t"]
    assert_same(before, after, {"x": draw(2, 3, 16), "z": draw(2, 3, 16, seed=1)})


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("sides", ["s, z", "z, s"])
def test_a_bias_before_them_goes_in_too(name: str, sides: str) -> None:
    before = graph(TWO, f"s = Add(x, bias) t = Add({sides}) {NORMS[name]}", WEIGHTS)
    after, report = fused(before, **GPU)
    assert operators(after) == {name: 1}
    assert_same(before, after, {"x": draw(2, 3, 16), "z": draw(2, 3, 16, seed=1)})
    after, report = fused(before, **GPU, disable_bias_skip_layer_norm_fusion=True)
    assert operators(after) == {name: 1, "Add": 1}
    _, report = fused(before, **GPU, disable_skip_layer_norm_fusion=True)
    assert not report.fused


REFUSED = {
    "a term that may be broadcast": (
        "(float[batch,seq,16] x, float[other,seq,16] z) => (float[batch,seq,16] y)",
        NORMS["SkipLayerNormalization"], "broadcast",
    ),
    "two axes": (
        "(float[rows,16] x, float[rows,16] z) => (float[rows,16] y)",
        NORMS["SkipLayerNormalization"], "three axes",
    ),
    "over two axes": (
        "(float[batch,4,16] x, float[batch,4,16] z) => (float[batch,4,16] y)",
        "y = LayerNormalization<axis=1>(t, both)", "last axis",
    ),
    "a mean that is read": (
        TWO.replace("y)", "y, float[batch,seq,1] mean)"),
        "y, mean = LayerNormalization<axis=-1>(t, g, b)", "mean",
    ),
    "numbers of 64 bits": (
        "(double[batch,seq,16] x, double[batch,seq,16] z) => (double[batch,seq,16] y)",
        "y = LayerNormalization<axis=-1>(t, gd)", "DOUBLE",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_sum_that_the_operator_does_not_take_stays(case: str) -> None:
    signature, norm, reason = REFUSED[case]
    weights = WEIGHTS + ", float[4,16] both, double[16] gd"
    before = graph(signature, f"t = Add(x, z) {norm}", weights)
    after, report = fused(before, **GPU)
    assert not report.fused
    assert reason in report.refused[0][2]
    assert operators(after)["LayerNormalization"] == 1


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("sides", ["x, z", "z, x"])
def test_a_term_may_be_one_row_for_the_whole_batch(name: str, sides: str) -> None:
    signature = TWO.replace("float[batch,seq,16] z", "float[1,seq,16] z")
    signature = signature.replace("y)", "y, float[batch,seq,16] t)")
    before = graph(signature, f"t = Add({sides}) {NORMS[name]}", WEIGHTS)
    after, report = fused(before, **GPU)
    assert report.fused == {name: 1}
    for batch in (1, 3):
        assert_same(before, after, {"x": draw(batch, 5, 16), "z": draw(1, 5, 16, seed=1)})


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("sides", ["s, z", "z, s"])
def test_a_processor_adds_all_terms_at_once(name: str, sides: str) -> None:
    signature = TWO.replace("y)", "y, float[batch,seq,16] t)")
    before = graph(signature, f"s = Add(x, bias) t = Add({sides}) {NORMS[name]}", WEIGHTS)
    after, report = fused(before)
    assert report.fused == {"Sum": 1}
    assert operators(after) == {"Sum": 1, name.removeprefix("Skip"): 1}
    feeds = {"x": draw(2, 3, 16), "z": draw(2, 3, 16, seed=1)}
    for a, b in zip(answers(before, feeds), answers(after, feeds), strict=True):
        np.testing.assert_array_equal(a, b)
    after, _ = fused(before, disable_bias_skip_layer_norm_fusion=True)
    assert operators(after)["Add"] == 1
    _, report = fused(before, disable_skip_layer_norm_fusion=True)
    assert not report.fused


def test_an_offset_before_a_norm_is_no_skip() -> None:
    before = graph(ALONE, f"t = Add(x, bias) {NORMS['SkipLayerNormalization']}", WEIGHTS)
    _, report = fused(before, **GPU)
    assert not report.fused


def test_a_norm_of_large_values_is_as_exact_as_onnxruntimes_own() -> None:
    before = graph(TWO, f"t = Add(x, z) {NORMS['SkipLayerNormalization']}", WEIGHTS)
    after, _ = fused(before, **GPU)
    x = draw(2, 3, 16) + np.float32(100)
    assert_same(before, after, {"x": x, "z": draw(2, 3, 16, seed=1)}, atol=1e-3)

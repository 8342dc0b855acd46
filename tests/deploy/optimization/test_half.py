"""Models in float16 keep the types of their inputs and outputs, and what float16 cannot hold."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from ortrain.deploy.optimization.half import floats_left, to_half
from tests.deploy.optimization.graphs import answers, draw, fused, graph, operators

SIGNATURE = "(float[batch,seq,16] x) => (float[batch,seq,16] y)"


def half(model: ir.Model) -> ir.Model:
    copy = ir.from_proto(ir.to_proto(model))
    to_half(copy)
    return copy


def assert_near(before: ir.Model, after: ir.Model, feeds: dict[str, np.ndarray]) -> None:
    for a, b in zip(answers(before, feeds), answers(after, feeds), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(b, a, atol=4e-3, rtol=4e-3)


def test_inputs_and_outputs_keep_their_types() -> None:
    body = "p = MatMul(x, w) q = Add(p, b) y = Relu(q)"
    before = graph(SIGNATURE, body, "float[16,16] w, float[16] b")
    after = half(before)
    assert [v.dtype for v in (*after.graph.inputs, *after.graph.outputs)] == [ir.DataType.FLOAT] * 2
    assert [v.name for v in (*after.graph.inputs, *after.graph.outputs)] == ["x", "y"]
    assert not list(floats_left(after))
    assert operators(after)["Cast"] == 2
    assert_near(before, after, {"x": draw(2, 3, 16)})


def test_integers_stay() -> None:
    signature = "(int64[batch,seq] x) => (float[batch,seq,16] y, int64[batch,seq] z)"
    before = graph(signature, "y = Gather(w, x) z = Abs(x)", "float[9,16] w")
    after = half(before)
    assert not list(floats_left(after))
    assert_near(before, after, {"x": np.array([[1, 8]])})


def test_a_number_that_casts_to_float_is_half_a_float() -> None:
    signature = "(int64[batch,16] x) => (float[batch,16] y)"
    before = graph(signature, "f = Cast<to=1>(x) y = Mul(f, c)", "float c = {0.5}")
    after = half(before)
    assert not list(floats_left(after))
    assert_near(before, after, {"x": np.arange(16)[None]})


def test_a_factor_of_which_float16_has_few_digits_stays_float32() -> None:
    body = "p = MatMul(x, w) q = Mul(p, c) y = Mul(q, d)"
    before = graph(SIGNATURE, body, "float[16,16] w, float c = {1e-7}, float d = {30000}")
    after = half(before)
    assert list(floats_left(after)) == ["c"]
    feeds = {"x": draw(2, 3, 16)}
    for a, b in zip(answers(before, feeds), answers(after, feeds), strict=True):
        assert np.abs(b - a).max() < 4e-3 * np.abs(a).max()  # it was 0.19


@pytest.mark.parametrize("perm", ["[1,0,2]", "[1,2,0]", "[2,0,1]", "[0,2,1]"])
def test_a_product_behind_a_transpose_of_the_batch_is_loaded(perm: str) -> None:
    """A session of float16 ended the process."""
    signature = "(float[16,16,16] x) => (float[16,16,16] y)"
    before = graph(signature, f"t = Transpose<perm={perm}>(x) y = MatMul(t, w)", "float[16,16] w")
    after = half(before)
    assert not list(floats_left(after))
    assert_near(before, after, {"x": draw(16, 16, 16)})
    content = ir.to_proto(after).SerializeToString()  # with all of its rewrites:
    assert onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])


def test_sequences_stay_float32() -> None:
    body = """p = MatMul(x, w) s = SplitToSequence<axis=2>(p, n) i = Identity(s)
        q = ConcatFromSequence<axis=2>(i) y = MatMul(q, w)"""
    before = graph(SIGNATURE, body, "float[16,16] w, int64 n = {8}")
    after = half(before)
    assert not list(floats_left(after))
    assert_near(before, after, {"x": draw(2, 3, 16)})


def test_angles_stay_float32() -> None:
    signature = "(int64[batch,seq] x, float[batch,seq,4] z) => (float[batch,seq,4] y)"
    body = "f = Cast<to=1>(x) u = Unsqueeze(f, two) a = MatMul(u, w) s = Sin(a) y = Add(s, z)"
    before = graph(signature, body, "float[1,4] w, int64[1] two = {2}")
    after = half(before)
    assert list(floats_left(after)) == ["w"]
    positions = np.array([[5000, 20001]])
    assert_near(before, after, {"x": positions, "z": draw(1, 2, 4)})


@pytest.mark.parametrize("epsilon", ["1e-12", "100000.0"])
def test_numbers_that_float16_has_not_stay_float32(epsilon: str) -> None:
    before = graph(SIGNATURE, "a = Mul(x, x) y = Div(a, e)", f"float e = {{{epsilon}}}")
    after = half(before)
    assert list(floats_left(after)) == ["e"]


def test_masks_have_the_lowest_number_of_float16() -> None:
    signature = "(float[batch,16] x, bool[batch,16] m) => (float[batch,16] y)"
    weights = "float zero = {0.0}, float low = {-3.4028234663852886e+38}"
    before = graph(
        signature, "b = Where(m, zero, low) s = Add(x, b) y = Softmax<axis=-1>(s)", weights
    )
    after = half(before)
    assert not list(floats_left(after))
    mask = draw(3, 16) > 0
    mask[:, 3] = True
    assert_near(before, after, {"x": draw(3, 16), "m": mask})


@pytest.mark.parametrize("lowest", ["-1e10", "-1e9", "-70000"])
@pytest.mark.parametrize(
    "mask", ["m = Where(seen, zero, low)", "n = Cast<to=1>(hidden) m = Mul(n, low)"]
)
def test_a_row_of_masks_that_float16_has_not_is_no_nan(lowest: str, mask: str) -> None:
    """Cast to float16 they were infinities, of which a softmax makes NaN."""
    signature = "(float[seq,16] x, bool[seq,16] hidden) => (float[seq,16] y)"
    body = f"seen = Not(hidden) {mask} p = MatMul(x, w) s = Add(p, m) y = Softmax(s)"
    before = graph(signature, body, f"float[16,16] w, float zero = {{0}}, float low = {{{lowest}}}")
    after = half(before)
    hidden = np.zeros((3, 16), bool)
    hidden[0], hidden[1, :5] = True, True
    found = answers(after, {"x": draw(3, 16), "hidden": hidden})[0]
    expected = answers(before, {"x": draw(3, 16), "hidden": hidden})[0]
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[1:], expected[1:], atol=4e-3)
    np.testing.assert_allclose(found[0].sum(), 1, atol=4e-3)
    assert not found[1, :5].any()


def test_numbers_that_become_whole_ones_stay_float32() -> None:
    """An edge of a histogram, the float32 next to 3, was 3: the last expert had no row."""
    before = graph(
        "(int64[n] x) => (int64[5] y)",
        "f = Cast<to=1>(x) u = Unsqueeze(f, axis) l = Less(u, edges) n = Cast<to=1>(l) "
        "s = ReduceSum<keepdims=0>(n, one) y = Cast<to=7>(s)",
        "int64[1] axis = {0}, int64[1] one = {1}, "
        "float[5,1] edges = {0.0, 0.75, 1.5, 2.25, 3.0000002384185791}",
    )
    after = half(before)
    feeds = {"x": np.array([0, 3, 3, 1, 2, 3])}
    np.testing.assert_array_equal(answers(after, feeds)[0], answers(before, feeds)[0])
    assert answers(after, feeds)[0][-1] == 6


def test_buckets_of_distances_are_those_of_float32() -> None:
    """As T5 has them: whole parts of logarithms, where half of a unit is another bucket."""
    before = graph(
        "(int64[n] x) => (float[n,16] y)",
        "f = Cast<to=1>(x) d = Div(f, eight) l = Log(d) q = Div(l, range) t = Mul(q, eight) "
        "b = Cast<to=7>(t) y = Gather(w, b)",
        "float[16,16] w, float eight = {8}, float range = {1.3862943611198906}",
    )
    after = half(before)
    feeds = {"x": np.arange(8, 100)}
    assert operators(after)["Cast"] == 3  # with that of the output
    assert_near(before, after, feeds)


def test_spelled_out_norms_stay_float32() -> None:
    body = """s = Mul(x, x) v = ReduceMean(s, last) r = Sqrt(v) y = Div(x, r)"""
    before = graph(SIGNATURE, body, "int64[1] last = {-1}")
    after = half(before)
    assert_near(before, after, {"x": draw(2, 3, 16) * 5})


def test_fused_operators_are_half_too() -> None:
    body = """s = Sigmoid(x) q = Mul(x, s) t = Add(q, z) n = LayerNormalization<axis=-1>(t, g)
              l = MatMul(n, w) d = Add(l, b) y = Gelu(d)"""
    signature = "(float[batch,seq,16] x, float[batch,seq,16] z) => (float[batch,seq,16] y)"
    before = graph(signature, body, "float[16] g, float[16,16] w, float[16] b")
    after, report = fused(before, optimize_for_gpu=True)
    assert {"QuickGelu", "SkipLayerNormalization", "BiasGelu"} == set(report.fused)
    to_half(after)
    assert not list(floats_left(after))
    assert operators(after)["Cast"] == 3
    assert_near(before, after, {"x": draw(2, 3, 16), "z": draw(2, 3, 16, seed=1)})


def test_bodies_keep_the_types_of_what_goes_in_and_out() -> None:
    body = """
        h = Mul(x, w)
        i = If(c) <
            then_branch = then_graph () => (float[batch,seq,16] a) { a = Mul(h, w) },
            else_branch = else_graph () => (float[batch,seq,16] b) { b = Relu(h) }
        > y = Add(i, w)"""
    signature = "(float[batch,seq,16] x, bool c) => (float[batch,seq,16] y)"
    before = graph(signature, body, "float[16] w")
    after = half(before)
    for chosen in (True, False):
        assert_near(before, after, {"x": draw(2, 3, 16), "c": np.array(chosen)})


def test_an_output_that_others_read_keeps_its_name() -> None:
    signature = SIGNATURE.replace("y)", "y, float[batch,seq,16] t)")
    before = graph(signature, "t = Mul(x, w) y = Relu(t)", "float[16] w")
    after = half(before)
    assert [v.name for v in after.graph.outputs] == ["y", "t"]
    assert_near(before, after, {"x": draw(2, 3, 16)})

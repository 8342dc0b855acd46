"""Projections of one value become one product within the attention."""

from __future__ import annotations

import numpy as np
import pytest

from tests.deploy.optimization.graphs import assert_same, draw, fused, graph, operators

WEIGHTS = (
    "float[32,96] w, float[96] b, float[96,32] wt, float[32,32] wq, float[32,32] wk, "
    "float[32,48] wv, float[48] bv, int64[2] rows = {-1,32}, "
    "int64[3] parts = {32,32,32}, int64[4] split = {0,0,4,8}, int64[3] join = {0,0,32}, "
    "int64[4] wide = {0,0,4,12}, int64[3] joined = {0,0,48}, float scale = {0.35355338}, "
    "int64[1] n0 = {0}, int64[1] n32 = {32}, int64[1] n64 = {64}, int64[1] n96 = {96}, "
    "int64[1] last = {2}"
)
BACK = "sizes = Shape<start=0,end=2>(x) back = Concat<axis=0>(sizes, n96) all = Reshape(g, back)"
SPLIT = "q0, k0, v0 = Split<axis=2>(all, parts)"
SLICES = """q0 = Slice(all, n0, n32, last) k0 = Slice(all, n32, n64, last)
            v0 = Slice(all, n64, n96, last)"""
HEADS = """
    q1 = Reshape(q0, split) q = Transpose<perm=[0,2,1,3]>(q1)
    k1 = Reshape(k0, split) k = Transpose<perm=[0,2,3,1]>(k1)
    v1 = Reshape(v0, split) v = Transpose<perm=[0,2,1,3]>(v1)
    s = MatMul(q, k) t = Mul(s, scale) u = Add(t, m) p = Softmax<axis=-1>(u) o = MatMul(p, v)
    o1 = Transpose<perm=[0,2,1,3]>(o) y = Reshape(o1, join)
"""
SIGNATURE = "(float[batch,seq,32] x, float[batch,1,seq,seq] m) => (float[batch,seq,32] y)"
FEEDS = ({"x": draw(1, 3, 32), "m": draw(1, 1, 3, 3)}, {"x": draw(3, 5, 32), "m": draw(3, 1, 5, 5)})


@pytest.mark.parametrize("parts", [SPLIT, SLICES])
@pytest.mark.parametrize(
    "product",
    [
        "p0 = MatMul(x, w) all = Add(p0, b)",
        "all = MatMul(x, w)",
        f"flat = Reshape(x, rows) g = Gemm(flat, w, b) {BACK}",
        f"flat = Reshape(x, rows) g = Gemm<transB=1>(flat, wt, b) {BACK}",
        "turned = Transpose<perm=[1,0]>(wt) p0 = MatMul(x, turned) all = Add(b, p0)",
    ],
)
def test_one_product_for_all_three_goes_in(product: str, parts: str) -> None:
    before = graph(SIGNATURE, product + " " + parts + HEADS, WEIGHTS)
    after, report = fused(before)
    assert +report.fused == {"Attention": 1}
    assert not operators(after).keys() & {"MatMul", "Gemm", "Split", "Slice"}
    weights = {v.name for v in after.graph.initializers.values()}
    assert ("w" in weights) is ("wt" not in product), "a matrix that fits is taken as it is"
    assert_same(before, after, *FEEDS)


def test_values_may_have_another_size() -> None:
    body = """q0 = MatMul(x, wq) k0 = MatMul(x, wk) v00 = MatMul(x, wv) v0 = Add(v00, bv)"""
    heads = HEADS.replace("Reshape(v0, split)", "Reshape(v0, wide)")
    heads = heads.replace("Reshape(o1, join)", "Reshape(o1, joined)")
    signature = SIGNATURE.replace("seq,32] y", "seq,48] y")
    before = graph(signature, body + heads, WEIGHTS)
    after, report = fused(before)
    assert +report.fused == {"Attention": 1}
    assert_same(before, after, *FEEDS)


def test_a_factor_behind_a_projection_goes_into_the_scale() -> None:
    body = "p0 = MatMul(x, w) all = Add(p0, b) " + SPLIT.replace("q0,", "q00,")
    heads = HEADS.replace("t = Mul(s, scale) u = Add(t, m)", "u = Add(s, m)")
    before = graph(SIGNATURE, body + " q0 = Mul(q00, scale)" + heads, WEIGHTS)
    after, report = fused(before)
    assert +report.fused == {"Attention": 1}
    assert_same(before, after, *FEEDS, atol=3e-5)


def test_layers_that_share_weights_share_the_packed_ones() -> None:
    layer = "q0 = MatMul(x, wq) k0 = MatMul(x, wk) v0 = MatMul(x, wq)" + HEADS
    second = layer
    for name in ("q0 k0 v0 q1 k1 v1 q k v s t u p o o1").split():
        for end in (" =", ",", ")"):
            second = second.replace(f" {name}{end}", f" {name}_{end}")
            second = second.replace(f"({name}{end}", f"({name}_{end}")
    second = " " + second.replace("q0 =", "q0_ =", 1).replace("(x,", "(y,").replace("y =", "y_ =")
    before = graph(SIGNATURE.replace("] y)", "] y_)"), layer + second, WEIGHTS)
    after, report = fused(before)
    assert +report.fused == {"Attention": 2}
    packed = [n for n in after.graph.initializers if "packed" in n]
    assert len(packed) == 2, "one matrix and one bias"
    assert_same(before, after, *FEEDS, atol=1e-4)


NEVER = {
    "weights that are fed": (
        SIGNATURE.replace("x,", "x, float[32,96] fed,"),
        "all = MatMul(x, fed) " + SPLIT,
    ),
    "a function behind a projection": (SIGNATURE, "a = MatMul(x, w) all = Relu(a) " + SPLIT),
    "parts of other axes": (
        "(float[1,96,32] x, float[1,1,32,32] m) => (float[1,32,32] y)",
        "all = MatMul(x, wq) " + SPLIT.replace("axis=2", "axis=1"),
    ),
}


@pytest.mark.parametrize("case", NEVER)
def test_what_is_no_projection_is_not_packed(case: str) -> None:
    signature, body = NEVER[case]
    before = graph(signature, body + HEADS, WEIGHTS)
    after, report = fused(before)
    assert +report.fused == {"MultiHeadAttention": 1}
    if "fed" in signature:
        feeds = [{**feed, "fed": draw(32, 96, seed=5)} for feed in FEEDS]
    elif "96,32] x" in signature:
        feeds = [{"x": draw(1, 96, 32), "m": draw(1, 1, 32, 32)}]
    else:
        feeds = list(FEEDS)
    assert_same(before, after, *feeds)


def test_packed_weights_are_what_they_were() -> None:
    body = "q0 = MatMul(x, wq) k0 = MatMul(x, wk) v0 = MatMul(x, wq)" + HEADS
    before = graph(SIGNATURE, body, WEIGHTS)
    after, _ = fused(before)
    name = next(n for n in after.graph.initializers if n.endswith(".packed"))
    packed = after.graph.initializers[name].const_value
    given = [before.graph.initializers[n].const_value for n in ("wq", "wk", "wq")]
    assert packed is not None
    np.testing.assert_array_equal(packed.numpy(), np.hstack([g.numpy() for g in given if g]))

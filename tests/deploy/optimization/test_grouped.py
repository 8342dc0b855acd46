"""Heads that share keys and values become one operator that copies neither."""

from __future__ import annotations

import numpy as np
import pytest

from tests.deploy.optimization.graphs import assert_same, draw, fused, graph, operators

WEIGHTS = (
    "float[32,32] wq, float[32,16] wk, float[32,16] wv, int64[4] split = {0,0,4,8}, "
    "int64[4] shared = {0,0,2,8}, int64[3] join = {0,0,32}, float scale = {0.35355338}, "
    "int64[1] two = {2}, int64[1] heads = {4}, int64[1] groups = {2}, int64[1] size = {8}"
)
PROJECTIONS = """
    q0 = MatMul(x, wq) q1 = Reshape(q0, split) q = Transpose<perm=[0,2,1,3]>(q1)
    k0 = MatMul(x, wk) k1 = Reshape(k0, shared) k2 = Transpose<perm=[0,2,1,3]>(k1)
    v0 = MatMul(x, wv) v1 = Reshape(v0, shared) v2 = Transpose<perm=[0,2,1,3]>(v1)
    b = Shape<start=0,end=1>(x) n = Shape<start=1,end=2>(x)
    wide = Concat<axis=0>(b, groups, two, n, size) full = Concat<axis=0>(b, heads, n, size)
    k3 = Unsqueeze(k2, two) k4 = Expand(k3, wide) k = Reshape(k4, full)
    v3 = Unsqueeze(v2, two) v4 = Expand(v3, wide) v = Reshape(v4, full)
"""
SCORES = """
    kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) t = Mul(s, scale) u = Add(t, m)
    p = Softmax<axis=-1>(u) o = MatMul(p, v) o1 = Transpose<perm=[0,2,1,3]>(o) y = Reshape(o1, join)
"""
SIGNATURE = "(float[batch,seq,32] x, float[batch,1,seq,seq] m) => (float[batch,seq,32] y)"


def masks(batch: int, length: int, fill: float) -> np.ndarray:
    seen = np.tril(np.ones((batch, 1, length, length), bool))
    seen[-1, :, :, :1] = False
    return np.where(seen, 0, fill).astype(np.float32)


@pytest.mark.parametrize("fill", [float(np.finfo(np.float32).min), -np.inf, -2.0])
def test_keys_are_shared_and_not_copied(fill: float) -> None:
    before = graph(SIGNATURE, PROJECTIONS + SCORES, WEIGHTS)
    after, report = fused(before)
    assert report.fused == {"GroupQueryAttention": 1}
    counts = operators(after)
    assert not counts.keys() & {"Softmax", "Transpose", "Concat"}
    for batch, length in ((1, 1), (1, 4), (3, 6)):
        assert_same(before, after, {"x": draw(batch, length, 32), "m": masks(batch, length, fill)})


def test_heads_of_a_size_that_the_kernel_refuses_are_copied() -> None:
    weights = WEIGHTS.replace("0,0,4,8", "0,0,8,4").replace("0,0,2,8", "0,0,4,4")
    weights = weights.replace("heads = {4}", "heads = {8}").replace("groups = {2}", "groups = {4}")
    weights = weights.replace("size = {8}", "size = {4}")
    before = graph(SIGNATURE, PROJECTIONS + SCORES, weights)
    after, report = fused(before)
    assert report.fused == {"MultiHeadAttention": 1}
    assert_same(before, after, {"x": draw(2, 5, 32), "m": masks(2, 5, -np.inf)})


def test_keys_of_a_cache_are_copied() -> None:
    signature = (
        "(float[batch,seq,32] x, float[batch,2,past,8] pk, float[batch,2,past,8] pv, "
        "float[batch,1,seq,all] m) => "
        "(float[batch,seq,32] y, float[batch,2,all,8] kk, float[batch,2,all,8] vv)"
    )
    projections = PROJECTIONS.replace("n = Shape<start=1,end=2>(x)", "n = Shape<start=3>(m)")
    projections = projections.replace(
        "k3 = Unsqueeze(k2", "kk = Concat<axis=2>(pk, k2) k3 = Unsqueeze(kk"
    )
    projections = projections.replace(
        "v3 = Unsqueeze(v2", "vv = Concat<axis=2>(pv, v2) v3 = Unsqueeze(vv"
    )
    before = graph(signature, projections + SCORES, WEIGHTS)
    after, report = fused(before)
    assert report.fused == {"MultiHeadAttention": 1}
    for past, length in ((0, 3), (4, 1)):
        feeds = {"x": draw(2, length, 32), "pk": draw(2, 2, past, 8), "pv": draw(2, 2, past, 8)}
        assert_same(before, after, {**feeds, "m": draw(2, 1, length, past + length)})


def test_the_operator_of_opset_23_shares_keys_too() -> None:
    signature = (
        "(float[batch,4,seq,8] q, float[batch,2,seq,8] k, float[batch,2,seq,8] v, "
        "bool[batch,1,seq,seq] m) => (float[batch,4,seq,8] y)"
    )
    before = graph(signature, "y = Attention(q, k, v, m)", "", 23)
    after, report = fused(before)
    assert report.fused == {"GroupQueryAttention": 1}
    feeds = {"q": draw(2, 4, 5, 8), "k": draw(2, 2, 5, 8, seed=1), "v": draw(2, 2, 5, 8, seed=2)}
    assert_same(before, after, {**feeds, "m": masks(2, 5, -1) == 0})


def test_a_causal_operator_shares_keys_too() -> None:
    signature = "(float[batch,4,seq,8] q, float[batch,2,seq,8] k, float[batch,2,seq,8] v)"
    before = graph(
        signature + " => (float[batch,4,seq,8] y)", "y = Attention<is_causal=1>(q, k, v)", "", 23
    )
    after, report = fused(before)
    assert report.fused == {"GroupQueryAttention": 1}
    feeds = {"q": draw(2, 4, 5, 8), "k": draw(2, 2, 5, 8, seed=1), "v": draw(2, 2, 5, 8, seed=2)}
    assert_same(before, after, feeds)

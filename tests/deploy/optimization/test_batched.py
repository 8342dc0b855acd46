"""Heads that are part of the batch in one half of an attention, and apart in the other."""

from __future__ import annotations

import numpy as np
import pytest

from tests.deploy.optimization.graphs import assert_same, draw, fused, graph, operators

WEIGHTS = (
    "float[32,32] wq, float[32,32] wk, float[32,32] wv, float[4,1] slopes, "
    "int64[4] split = {0,0,4,8}, int64[3] join = {0,0,32}, float scale = {0.35355338}, "
    "int64[1] four = {4}, int64[1] eight = {8}, int64[1] hole = {-1}, int64[1] one = {1}, "
    "int64[1] two = {2}"
)
SIZES = """b = Shape<start=0,end=1>(x) n = Shape<start=1,end=2>(x) rows = Mul(b, four)
    folded = Concat<axis=0>(rows, hole, eight) apart = Concat<axis=0>(b, four, n, hole)
    flat = Concat<axis=0>(rows, n, hole)
"""
HEADS = "".join(
    f"""{p}0 = MatMul(x, w{p}) {p}1 = Reshape({p}0, split) {p}4 = Transpose<perm=[0,2,1,3]>({p}1)
    {p} = Reshape({p}4, folded)
    """
    for p in "qkv"
)
SCORES = "kt = Transpose<perm=[0,2,1]>(k) s = MatMul(q, kt) t = Mul(s, scale) "
ALIBI = """place = Unsqueeze(position, one) each = Mul(place, slopes)
    shown = Concat<axis=0>(rows, one, hole) alibi = Reshape(each, shown) u = Add(alibi, t) """
TAIL = """m4 = Add(u4, m) p4 = Softmax<axis=-1>(m4) p = Reshape(p4, flat) c = MatMul(p, v)
    c4 = Reshape(c, apart) o = Transpose<perm=[0,2,1,3]>(c4) y = Reshape(o, join)"""
SIGNATURE = (
    "(float[batch,seq,32] x, float[batch,1,seq,seq] m, float[batch,seq] position) => "
    "(float[batch,seq,32] y)"
)


def masked(batch: int, length: int) -> dict[str, np.ndarray]:
    mask = np.where(np.tril(np.ones((batch, 1, length, length), bool)), 0, -3e38)
    mask[-1, :, :, :1] = -3e38
    return {
        "x": draw(batch, length, 32), "m": mask.astype(np.float32),
        "position": draw(batch, length, seed=3),
    }  # fmt: skip


def test_positions_that_are_added_to_heads_in_the_batch_become_a_bias() -> None:
    # BLOOM: alibi is [batch * heads, 1, length], the mask [batch, 1, length, length].
    body = SIZES + HEADS + SCORES + ALIBI + "u4 = Reshape(u, apart) " + TAIL
    before = graph(SIGNATURE, body, WEIGHTS)
    after, report = fused(before)
    assert report.fused == {"heads apart": 1, "Attention": 1}
    assert not operators(after).keys() & {"Softmax", "MatMul", "Transpose"}
    for sizes in ((1, 1), (2, 5), (3, 7)):
        assert_same(before, after, masked(*sizes))


def test_scores_that_others_read_keep_their_attention() -> None:
    body = SIZES + HEADS + SCORES + ALIBI + "u4 = Reshape(u, apart) " + TAIL
    signature = SIGNATURE.replace("y)", "y, float[rows4,seq,seq] p)")
    before = graph(signature, body, WEIGHTS)
    after, report = fused(before)
    assert "Attention" not in report.fused
    assert operators(after)["Softmax"] == 1
    assert_same(before, after, masked(2, 5))


def test_a_softmax_in_the_batch_is_seen_through() -> None:
    # Marian of old: apart for the mask alone.
    body = SIZES + HEADS + SCORES + "u4 = Reshape(t, apart) m4 = Add(u4, m) m3 = Reshape(m4, flat) "
    body += "p = Softmax<axis=-1>(m3) c = MatMul(p, v) c4 = Reshape(c, apart) "
    body += "o = Transpose<perm=[0,2,1,3]>(c4) y = Reshape(o, join)"
    signature = SIGNATURE.replace(", float[batch,seq] position", "")
    before = graph(signature, body, WEIGHTS)
    after, report = fused(before)
    assert report.fused == {"heads apart": 1, "Attention": 1}
    for sizes in ((1, 1), (2, 5)):
        feeds = masked(*sizes)
        assert_same(before, after, {name: feeds[name] for name in "xm"})


@pytest.mark.parametrize("other", ["float[rows4,1,seq] alibi", "float[other,1,seq] alibi"])
def test_positions_of_rows_that_may_be_others_stay(other: str) -> None:
    body = SIZES + HEADS + SCORES + "u = Add(alibi, t) u4 = Reshape(u, apart) " + TAIL
    signature = SIGNATURE.replace("float[batch,seq] position", other)
    before = graph(signature, body, WEIGHTS)
    after, report = fused(before)
    assert "Attention" not in report.fused
    feeds = masked(2, 5)
    feeds["alibi"] = draw(8, 1, 5, seed=4)
    del feeds["position"]
    assert_same(before, after, feeds)


def test_what_stands_between_the_products_is_named() -> None:
    body = SIZES + HEADS + SCORES + "h = Tanh(t) p = Softmax<axis=-1>(h) y = MatMul(p, v)"
    signature = "(float[batch,seq,32] x) => (float[rows4,seq,8] y)"
    _, report = fused(graph(signature, body, WEIGHTS))
    assert not report.fused
    assert [(f, v) for f, v, _ in report.refused] == [("attention", "y")]
    assert report.refused[0][2].startswith("Tanh stands between")

"""Rotary embeddings become one operator, or stay for a reason."""

from __future__ import annotations

import numpy as np
import pytest

from tests.deploy.optimization.graphs import answers, assert_same, draw, fused, graph, operators

WEIGHTS = (
    "float[1,4] frequencies, int64[4] split = {0,0,4,8}, int64[3] join = {0,0,32}, "
    "int64[1] zero = {0}, int64[1] half = {4}, int64[1] end = {9223372036854775807}, "
    "int64[1] last = {3}, int64[1] one = {1}, float grow = {1.5}, int64[1] two = {2}"
)
ANGLES = """
    f = Cast<to=1>(positions) g = Unsqueeze(f, two) a = Mul(g, frequencies)
    e = Concat<axis=-1>(a, a) c0 = Cos(e) c1 = Mul(c0, grow) s0 = Sin(e) s1 = Mul(s0, grow)
    cos = Unsqueeze(c1, one) sin = Unsqueeze(s1, one)
"""
TURNED = """
    low = Slice(q, zero, half, last) high = Slice(q, half, end, last) minus = Neg(high)
    turned = Concat<axis=-1>(minus, low) p = Mul(q, cos) r = Mul(turned, sin) o = Add(p, r)
"""
SPLIT = "q0 = Reshape(x, split) q = Transpose<perm=[0,2,1,3]>(q0)"
MERGE = "o1 = Transpose<perm=[0,2,1,3]>(o) y = Reshape(o1, join)"
SIGNATURE = "(float[batch,seq,32] x, int64[batch,seq] positions) => (float[batch,seq,32] y)"
APART = "(float[batch,4,seq,8] q, int64[batch,seq] positions) => (float[batch,4,seq,8] o)"


def feeds(batch: int, length: int) -> dict[str, np.ndarray]:
    """Positions of other rows in another order, as padding on the left gives them."""
    positions = np.arange(length)[None] + 3 * np.arange(batch)[:, None]
    positions[-1] = positions[-1][::-1]
    return {"x": draw(batch, length, 32), "positions": positions}


def test_it_becomes_one_operator_on_merged_heads() -> None:
    before = graph(SIGNATURE, ANGLES + SPLIT + TURNED + MERGE, WEIGHTS)
    after, report = fused(before)
    assert report.fused == {"RotaryEmbedding": 1}
    assert not operators(after).keys() & {"Transpose", "Neg", "Slice"}
    assert_same(before, after, feeds(1, 1), feeds(1, 5), feeds(3, 4))


def test_heads_that_come_apart_stay_apart() -> None:
    before = graph(APART, ANGLES + TURNED, WEIGHTS)
    after, report = fused(before)
    assert report.fused == {"RotaryEmbedding": 1}
    assert not operators(after)["Transpose"]
    feed = feeds(3, 4)
    assert_same(before, after, {"q": draw(3, 4, 4, 8), "positions": feed["positions"]})


def test_positions_that_rows_share_need_no_copies() -> None:
    signature = "(float[batch,4,seq,8] q, int64[1,seq] positions) => (float[batch,4,seq,8] o)"
    before = graph(signature, ANGLES + TURNED, WEIGHTS)
    after, report = fused(before)
    assert report.fused == {"RotaryEmbedding": 1}
    assert not operators(after)["Range"]
    assert_same(before, after, {"q": draw(3, 4, 5, 8), "positions": np.arange(5)[None] + 7})


def test_query_and_key_share_their_angles() -> None:
    again = TURNED.replace("q,", "k,")
    for name in ("low", "high", "minus", "turned", "p", "r", "o"):
        again = again.replace(f"{name} =", f"{name}_ =").replace(f"({name},", f"({name}_,")
        again = again.replace(f"({name})", f"({name}_)").replace(f", {name})", f", {name}_)")
    signature = (
        "(float[batch,4,seq,8] q, float[batch,2,seq,8] k, int64[batch,seq] positions) => "
        "(float[batch,4,seq,8] o, float[batch,2,seq,8] o_)"
    )
    before = graph(signature, ANGLES + TURNED + again, WEIGHTS)
    after, report = fused(before)
    assert report.fused == {"RotaryEmbedding": 2}
    assert operators(after)["Cos"] == operators(after)["Sin"] == 1
    feed = feeds(2, 3)
    given = {"q": draw(2, 4, 3, 8), "k": draw(2, 2, 3, 8), "positions": feed["positions"]}
    assert_same(before, after, given)


GIVEN = """(float[batch,4,seq,8] q, float[B,1,seq,8] cos, float[B,1,seq,8] sin) =>
           (float[batch,4,seq,8] o)"""
REFUSED = {
    "halves that differ": (
        SIGNATURE, ANGLES.replace("Concat<axis=-1>(a, a)", "Concat<axis=-1>(a, g2)").replace(
            "e =", "g2 = Neg(a) e ="
        ) + SPLIT + TURNED + MERGE, "halves",
    ),
    "angles of each head": (
        GIVEN.replace("B,1", "batch,4"), TURNED, "cos and sin",
    ),
    "angles that are given": (
        GIVEN.replace("B,1", "batch,1"), TURNED, "halves",
    ),
    "angles of another batch": (
        GIVEN.replace("B,1", "other,1"), TURNED, "batch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_shown_to_be_equal_stays(case: str) -> None:
    signature, body, reason = REFUSED[case]
    _, report = fused(graph(signature, body, WEIGHTS))
    assert not report.fused
    assert reason in report.refused[0][2]


@pytest.mark.parametrize(
    "other",
    [
        TURNED.replace("Concat<axis=-1>(minus, low)", "Concat<axis=-1>(low, minus)"),
        TURNED.replace("Neg(high)", "Abs(high)"),
        TURNED.replace("Mul(q, cos)", "Mul(turned, cos)"),
    ],
)
def test_what_is_no_rotation_stays(other: str) -> None:
    _, report = fused(graph(APART, ANGLES + other, WEIGHTS))
    assert not report.fused


OPERATOR = "(float[batch,seq,32] x, float[B,seq,4] cos, float[B,seq,4] sin"


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("rows", ["batch", "1"])
def test_the_operator_of_opset_23_takes_angles_that_rows_share(rows: str, interleaved: int) -> None:
    body = f"{SPLIT} o = RotaryEmbedding<interleaved={interleaved}>(q, cos, sin) {MERGE}"
    signature = OPERATOR.replace("B", rows) + ") => (float[batch,seq,32] y)"
    before = graph(signature, body, WEIGHTS, 23)
    after, report = fused(before)
    assert report.fused == {"RotaryEmbedding": 1}
    assert not operators(after)["Transpose"]
    for batch in (1, 3):
        own = 1 if rows == "1" else batch
        feeds = {"x": draw(batch, 5, 32), "cos": draw(own, 5, 4), "sin": draw(own, 5, 4, seed=1)}
        # Onnxruntime's kernel refuses to share them.
        whole = {**feeds, **{n: np.tile(feeds[n], (batch // own, 1, 1)) for n in ("cos", "sin")}}
        given = graph(signature.replace("[1,", "[batch,"), body, WEIGHTS, 23)
        np.testing.assert_allclose(answers(after, feeds)[0], answers(given, whole)[0], atol=1e-6)


def test_the_operator_of_opset_23_takes_positions() -> None:
    signature = """(float[batch,seq,32] x, float[9,4] cos, float[9,4] sin, int64[batch,seq] at) =>
                   (float[batch,seq,32] y)"""
    before = graph(signature, f"{SPLIT} o = RotaryEmbedding(q, cos, sin, at) {MERGE}", WEIGHTS, 23)
    after, report = fused(before)
    assert report.fused == {"RotaryEmbedding": 1}
    at = np.array([[0, 8, 3], [2, 2, 1]])
    feeds = {"x": draw(2, 3, 32), "cos": draw(9, 4), "sin": draw(9, 4, seed=1), "at": at}
    assert_same(before, after, feeds)


def test_it_stays_where_that_is_asked_for() -> None:
    _, report = fused(graph(APART, ANGLES + TURNED, WEIGHTS), disable_rotary_embeddings=True)
    assert not report.fused

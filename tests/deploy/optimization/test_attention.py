"""Attention in every form becomes one operator, or stays for a reason."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from tests.deploy.optimization.graphs import answers, assert_same, draw, fused, graph, operators

LOWEST = float(np.finfo(np.float32).min)
WEIGHTS = (
    "float[32,32] wq, float[32,32] wk, float[32,32] wv, float[32] bq, float[32] bk, float[32] bv, "
    "int64[4] split = {0,0,4,8}, int64[3] join = {0,0,32}, float root = {2.828427}, "
    "float scale = {0.35355338}, float half = {0.59460354}, float zero = {0.0}, "
    "float lowest = {-3.4028234663852886e+38}, float thousands = {-10000.0}"
)
PROJECTIONS = """
    q0 = MatMul(x, wq) q1 = Add(q0, bq) q2 = Reshape(q1, split)
    q = Transpose<perm=[0,2,1,3]>(q2)
    k0 = MatMul(x, wk) k1 = Add(k0, bk) k2 = Reshape(k1, split)
    k = Transpose<perm=[0,2,1,3]>(k2)
    v0 = MatMul(x, wv) v1 = Add(bv, v0) v2 = Reshape(v1, split)
    v = Transpose<perm=[0,2,1,3]>(v2)
"""
MERGE = "o1 = Transpose<perm=[0,2,1,3]>(o) y = Reshape(o1, join)"
MASKED = "(float[batch,seq,32] x, float[batch,1,seq,seq] m) => (float[batch,seq,32] y)"
PADDED = "(float[batch,seq,32] x, float[batch,1,1,seq] m) => (float[batch,seq,32] y)"
ALONE = "(float[batch,seq,32] x) => (float[batch,seq,32] y)"
CHOSEN = "(float[batch,seq,32] x, bool[batch,1,seq,seq] m) => (float[batch,seq,32] y)"

FORMS = {
    "scores that are divided": """
        kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) t = Div(s, root) u = Add(t, m)
        p = Softmax<axis=-1>(u) o = MatMul(p, v)""",
    "a mask on the left": """
        kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) t = Mul(scale, s) u = Add(m, t)
        p = Softmax<axis=3>(u) o = MatMul(p, v)""",
    "keys transposed with the heads": """
        kt = Transpose<perm=[0,2,3,1]>(k2) s = MatMul(q, kt) t = Mul(s, scale) u = Add(t, m)
        p = Softmax<axis=-1>(u) o = MatMul(p, v)""",
    "factors on both sides": """
        qs = Mul(q, half) kt = Transpose<perm=[0,1,3,2]>(k) ks = Mul(kt, half) s = MatMul(qs, ks)
        u = Add(s, m) p = Softmax<axis=-1>(u) o = MatMul(p, v)""",
    "a factor on the query": """
        qs = Mul(q, scale) kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(qs, kt) u = Add(s, m)
        p = Softmax<axis=-1>(u) o = MatMul(p, v)""",
    "keys by way of three axes": """
        n1 = Constant<value_ints=[-1]>() n = Shape<start=2,end=3>(k) d = Shape<start=3>(k)
        b = Shape<start=0,end=2>(k) flat = Concat<axis=0>(n1, n, d) back = Concat<axis=0>(b, d, n)
        k3 = Reshape(k, flat) k4 = Transpose<perm=[0,2,1]>(k3) kt = Reshape(k4, back)
        qs = Mul(q, half) ks = Mul(kt, half) s = MatMul(qs, ks) u = Add(s, m)
        p = Softmax<axis=-1>(u) o = MatMul(p, v)""",
    "copies and a dropout": """
        qi = Identity(q) kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(qi, kt) t = Div(s, root)
        u = Add(t, m) c = Cast<to=1>(u) p = Softmax<axis=-1>(c) d = Dropout(p) o = MatMul(d, v)""",
    "a root that is computed": """
        n = Shape<start=-1>(q) f = Cast<to=1>(n) r = Sqrt(f) kt = Transpose<perm=[0,1,3,2]>(k)
        s = MatMul(q, kt) t = Div(s, r) u = Add(t, m) p = Softmax<axis=-1>(u) o = MatMul(p, v)""",
}  # fmt: skip


def masks(batch: int, length: int, fill: float) -> np.ndarray:
    """Causal, with the last row padded on the left."""
    seen = np.tril(np.ones((batch, 1, length, length), bool))
    seen[-1, :, :, :1] = False
    return np.where(seen, 0, fill).astype(np.float32)


# A Shape has a range from opset 15 on.
OF_OPSETS = [(f, o) for f in FORMS for o in (13, 17, 20) if o >= 15 or "start" not in FORMS[f]]


@pytest.mark.parametrize(("form", "opset"), OF_OPSETS)
def test_a_spelled_out_attention_becomes_one_operator(form: str, opset: int) -> None:
    body = FORMS[form]
    before = graph(MASKED, PROJECTIONS + body + MERGE, WEIGHTS, opset)
    after, report = fused(before)
    assert report.fused == {"Attention": 1}
    assert not report.refused
    assert not operators(after).keys() & {"Softmax", "MatMul", "Transpose", "Add"}
    for fill in (LOWEST, -np.inf, -3.0):
        feeds = [{"x": draw(b, n, 32), "m": masks(b, n, fill)} for b, n in ((1, 5), (3, 7))]
        assert_same(before, after, *feeds)


def test_a_mask_of_keys_alone_is_spread_over_the_queries() -> None:
    body = FORMS["scores that are divided"]
    before = graph(PADDED, PROJECTIONS + body + MERGE, WEIGHTS)
    after, report = fused(before)
    assert report.fused == {"Attention": 1}
    assert operators(after)["Expand"] == 1
    right, left = np.zeros((2, 1, 1, 6), np.float32), np.zeros((2, 1, 1, 6), np.float32)
    right[1, ..., 4:] = left[1, ..., :2] = LOWEST
    everything = np.full((2, 1, 1, 6), LOWEST, np.float32)
    feeds = [{"x": draw(2, 6, 32), "m": m} for m in (right, left, everything)]
    assert_same(before, after, *feeds)
    assert_same(before, after, {"x": draw(1, 1, 32), "m": np.zeros((1, 1, 1, 1), np.float32)})


def test_sizes_may_be_computed_at_run_time() -> None:
    # As older exporters write them: from the input of a projection, each dimension by itself.
    sizes = """s0 = Shape(x) i0 = Constant<value_int=0>() i1 = Constant<value_int=1>()
        b0 = Gather<axis=0>(s0, i0) n0 = Gather<axis=0>(s0, i1) z = Constant<value_ints=[0]>()
        b1 = Unsqueeze(b0, z) n1 = Unsqueeze(n0, z) h = Constant<value_ints=[4]>()
        d = Constant<value_ints=[8]>() w = Constant<value_ints=[32]>()
        split = Concat<axis=0>(b1, n1, h, d) join = Concat<axis=0>(b1, n1, w)"""
    weights = WEIGHTS.replace("int64[4] split = {0,0,4,8}, int64[3] join = {0,0,32}, ", "")
    before = graph(MASKED, sizes + PROJECTIONS + FORMS["a root that is computed"] + MERGE, weights)
    after, report = fused(before)
    assert report.fused == {"Attention": 1}
    assert not operators(after)["Transpose"]
    assert_same(before, after, {"x": draw(3, 5, 32), "m": masks(3, 5, LOWEST)})


def test_layers_share_what_is_made_of_their_mask() -> None:
    body = PROJECTIONS + FORMS["scores that are divided"] + MERGE
    names = ("q0 q1 q2 q k0 k1 k2 k v0 v1 v2 v kt s t u p o o1 y").split()
    again = " ".join(
        {"x": "y", **{name: f"{name}_" for name in names}}.get(word, word)
        for word in body.replace("(", " ( ").replace(")", " ) ").replace(",", " , ").split()
    ).replace("[ 0", "[0")  # fmt: skip
    before = graph(PADDED.replace(" y)", " y_)"), body + "\n" + again, WEIGHTS)
    after, report = fused(before)
    assert report.fused == {"Attention": 2}
    assert operators(after)["Expand"] == 1
    assert_same(
        before, after, {"x": draw(2, 4, 32), "m": masks(2, 4, -np.inf)[:, :, 3:]}, atol=1e-4
    )


def test_no_mask_is_no_bias() -> None:
    body = """kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) t = Mul(s, scale)
              p = Softmax<axis=-1>(t) o = MatMul(p, v)"""
    before = graph(ALONE, PROJECTIONS + body + MERGE, WEIGHTS)
    after, report = fused(before)
    assert report.fused == {"Attention": 1}
    assert_same(before, after, {"x": draw(2, 5, 32)}, {"x": draw(1, 1, 32)})


@pytest.mark.parametrize("fill", [LOWEST, -np.inf])
@pytest.mark.parametrize("sides", ["t, fill", "fill, t"])
def test_a_mask_that_chooses_becomes_one_that_is_added(fill: float, sides: str) -> None:
    body = f"""kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) t = Mul(s, scale)
               u = Where(m, {sides}) p = Softmax<axis=-1>(u) o = MatMul(p, v)"""
    before = graph(CHOSEN, PROJECTIONS + body + MERGE, WEIGHTS + ", float fill = {0.0}")
    before.graph.initializers["fill"].const_value = ir.tensor(np.float32(fill), name="fill")
    after, report = fused(before)
    assert report.fused == {"Attention": 1}
    seen = masks(3, 6, -1) == 0
    assert_same(before, after, {"x": draw(3, 6, 32), "m": seen}, {"x": draw(3, 6, 32), "m": ~seen})


def test_a_mask_to_which_scores_still_count_stays() -> None:
    body = """kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) t = Mul(s, scale)
              u = Where(m, t, thousands) p = Softmax<axis=-1>(u) o = MatMul(p, v)"""
    before = graph(CHOSEN, PROJECTIONS + body + MERGE, WEIGHTS)
    after, report = fused(before)
    assert not report.fused
    assert [(f, v) for f, v, _ in report.refused] == [("attention", "o")]
    assert "-10000" in report.refused[0][2]
    assert_same(before, after, {"x": draw(2, 4, 32), "m": np.zeros((2, 1, 4, 4), bool)})


def test_rows_that_pytorch_clears_are_cleared() -> None:
    body = """kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) t = Mul(s, scale) u = Add(t, m)
              p = Softmax<axis=-1>(u) n = IsNaN(p) w = Where(n, zero, p) o = MatMul(w, v)"""
    before = graph(MASKED, PROJECTIONS + body + MERGE, WEIGHTS)
    after, report = fused(before)
    assert report.fused == {"Attention": 1}
    mask = masks(2, 5, -np.inf)
    feeds = {"x": draw(2, 5, 32), "m": mask}
    assert_same(before, after, feeds)
    assert not answers(after, feeds)[0][1, 0].any()


def test_rows_that_a_factor_clears_stay_in_place() -> None:
    signature = (
        "(float[batch,seq,32] x, float[batch,1,seq,seq] m, float[batch,1,seq,1] alive) => "
        "(float[batch,seq,32] y)"
    )
    body = FORMS["scores that are divided"].replace("o = MatMul", "oo = MatMul")
    before = graph(signature, PROJECTIONS + body + "o = Mul(oo, alive)" + MERGE, WEIGHTS)
    after, report = fused(before)
    assert report.fused == {"Attention": 1}
    assert not operators(after)["Transpose"]
    alive = (draw(2, 1, 5, 1) > 0).astype(np.float32)
    assert_same(before, after, {"x": draw(2, 5, 32), "m": masks(2, 5, LOWEST), "alive": alive})


REFUSED = {
    "weights that are an output": (
        MASKED.replace("y)", "y, float[batch,4,seq,seq] p)"),
        FORMS["scores that are divided"],
        "read elsewhere",
    ),
    "a mask that may widen the batch": (
        "(float[batch,seq,32] x, float[other,1,seq,seq] m) => (float[batch,seq,32] y)",
        FORMS["scores that are divided"],
        "batch",
    ),
    "a mask of as many heads as the batch has": (
        "(float[batch,seq,32] x, float[1,batch,seq,seq] m) => (float[batch,seq,32] y)",
        FORMS["scores that are divided"],
        "heads",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_shown_to_be_equal_stays(case: str) -> None:
    signature, body, reason = REFUSED[case]
    _, report = fused(graph(signature, PROJECTIONS + body + MERGE, WEIGHTS))
    assert not report.fused
    assert [(f, v) for f, v, _ in report.refused] == [("attention", "o")]
    assert reason in report.refused[0][2]


NEVER = {
    "a softmax over the queries": FORMS["a factor on the query"].replace("axis=-1", "axis=2"),
    "scores that are squashed": """
        kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) h = Tanh(s) u = Add(h, m)
        p = Softmax<axis=-1>(u) o = MatMul(p, v)""",
    "a product with the mask": """
        kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) u = Mul(s, m)
        p = Softmax<axis=-1>(u) o = MatMul(p, v)""",
    "weights that are halved": """
        kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) u = Add(s, m)
        p = Softmax<axis=-1>(u) pp = Mul(p, half) o = MatMul(pp, v)""",
}  # fmt: skip


@pytest.mark.parametrize("case", NEVER)
def test_what_is_no_attention_stays(case: str) -> None:
    before = graph(MASKED, PROJECTIONS + NEVER[case] + MERGE, WEIGHTS)
    after, report = fused(before)
    assert not report.fused
    assert operators(after)["Softmax"] == 1
    assert_same(before, after, {"x": draw(2, 4, 32), "m": masks(2, 4, -5.0)})


def test_projections_stay_products_where_that_is_asked_for() -> None:
    body = FORMS["scores that are divided"]
    before = graph(MASKED, PROJECTIONS + body + MERGE, WEIGHTS)
    for option in ("use_multi_head_attention", "disable_packed_qkv"):
        after, report = fused(before, **{option: True})
        assert report.fused == {"MultiHeadAttention": 1}
        assert operators(after)["MatMul"] == 3
        assert not operators(after)["Transpose"]
        assert_same(before, after, {"x": draw(2, 4, 32), "m": masks(2, 4, LOWEST)})
    _, report = fused(before, disable_attention_fusion=True)
    assert not report.fused


def test_cross_attention_is_not_packed() -> None:
    signature = (
        "(float[batch,seq,32] x, float[batch,far,32] e, float[batch,1,seq,far] m) => "
        "(float[batch,seq,32] y)"
    )
    projections = PROJECTIONS.replace("MatMul(x, wk)", "MatMul(e, wk)")
    projections = projections.replace("MatMul(x, wv)", "MatMul(e, wv)")
    body = FORMS["scores that are divided"]
    before = graph(signature, projections + body + MERGE, WEIGHTS)
    after, report = fused(before)
    assert report.fused == {"MultiHeadAttention": 1}
    mask = np.zeros((2, 1, 3, 5), np.float32)
    mask[1, ..., 3:] = LOWEST
    assert_same(before, after, {"x": draw(2, 3, 32), "e": draw(2, 5, 32, seed=1), "m": mask})


def test_a_cache_goes_in_with_heads_apart() -> None:
    signature = (
        "(float[batch,seq,32] x, float[batch,4,past,8] pk, float[batch,4,past,8] pv, "
        "float[batch,1,seq,all] m) => "
        "(float[batch,seq,32] y, float[batch,4,all,8] kk, float[batch,4,all,8] vv)"
    )
    body = """kk = Concat<axis=2>(pk, k) vv = Concat<axis=2>(pv, v)
        kt = Transpose<perm=[0,1,3,2]>(kk) s = MatMul(q, kt) t = Div(s, root) u = Add(t, m)
        p = Softmax<axis=-1>(u) o = MatMul(p, vv)"""
    before = graph(signature, PROJECTIONS + body + MERGE, WEIGHTS)
    after, report = fused(before)
    assert report.fused == {"MultiHeadAttention": 1}
    for batch, past, length in ((1, 0, 4), (2, 3, 1), (2, 5, 2)):
        feeds = {"x": draw(batch, length, 32), "pk": draw(batch, 4, past, 8, seed=1)}
        feeds["pv"] = draw(batch, 4, past, 8, seed=2)
        feeds["m"] = draw(batch, 1, length, past + length, seed=4)
        assert_same(before, after, feeds)


def test_heads_in_the_batch_are_one_head() -> None:
    signature = "(float[rows,n,8] q, float[rows,m,8] k, float[rows,m,6] v, float[1,n,m] b)"
    body = """kt = Transpose<perm=[0,2,1]>(k) s = MatMul(q, kt) t = Add(s, b)
              p = Softmax<axis=-1>(t) y = MatMul(p, v)"""
    before = graph(signature + " => (float[rows,n,6] y)", body)
    after, report = fused(before)
    assert report.fused == {"MultiHeadAttention": 1}
    feeds = {"q": draw(6, 3, 8), "k": draw(6, 5, 8), "v": draw(6, 5, 6), "b": draw(1, 3, 5)}
    assert_same(before, after, feeds)


def test_a_bias_of_each_head_is_added() -> None:
    # T5: no scale, and positions that count for each head.
    signature = (
        "(float[batch,seq,32] x, float[1,4,seq,seq] position, float[batch,1,1,seq] m) => "
        "(float[batch,seq,32] y)"
    )
    body = """b = Add(position, m) kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) u = Add(s, b)
              p = Softmax<axis=-1>(u) o = MatMul(p, v)"""
    two = body.replace("b = Add(position, m)", "").replace("Add(s, b)", "Add(c, m)").replace(
        "p = S", "p = S"
    ).replace("u = Add", "c = Add(s, position) u = Add")  # fmt: skip
    for form in (body, two):
        before = graph(signature, PROJECTIONS + form + MERGE, WEIGHTS)
        after, report = fused(before)
        assert report.fused == {"Attention": 1}
        mask = np.zeros((2, 1, 1, 5), np.float32)
        mask[1, ..., 3:] = LOWEST
        feeds = {"x": draw(2, 5, 32), "position": draw(1, 4, 5, 5, seed=3), "m": mask}
        assert_same(before, after, feeds, atol=3e-5)


def test_a_factor_over_scores_and_masks_is_over_both() -> None:
    body = """kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) t = Add(s, m) u = Mul(t, scale)
              p = Softmax<axis=-1>(u) o = MatMul(p, v)"""
    before = graph(MASKED, PROJECTIONS + body + MERGE, WEIGHTS)
    after, report = fused(before)
    assert report.fused == {"Attention": 1}
    assert_same(before, after, {"x": draw(2, 5, 32), "m": draw(2, 1, 5, 5, seed=4)})


def test_fixed_sizes_of_pictures_need_no_symbols() -> None:
    before = graph(
        "(float[2,5,32] x) => (float[2,5,32] y)",
        PROJECTIONS + FORMS["a factor on the query"].replace("u = Add(s, m)", "u = Identity(s)")
        + MERGE,
        WEIGHTS,
    )  # fmt: skip
    after, report = fused(before)
    assert report.fused == {"Attention": 1}
    assert_same(before, after, {"x": draw(2, 5, 32)})


def test_an_attention_in_a_body_is_fused_there() -> None:
    inner = PROJECTIONS + FORMS["scores that are divided"] + MERGE.replace("y =", "a =")
    body = f"""y = If(c) <
        then_branch = then_graph () => (float[batch,seq,32] a) {{ {inner} }},
        else_branch = else_graph () => (float[batch,seq,32] b) {{ b = Relu(x) }} >"""
    before = graph(MASKED.replace("m)", "m, bool c)"), body, WEIGHTS)
    after, report = fused(before)
    assert report.fused == {"Attention": 1}
    for chosen in (True, False):
        feeds = {"x": draw(2, 5, 32), "m": masks(2, 5, LOWEST), "c": np.array(chosen)}
        assert_same(before, after, feeds)


OPERATOR = "(float[batch,4,seq,8] q, float[batch,4,seq,8] k, float[batch,4,seq,8] v"


@pytest.mark.parametrize("mask", ["", ", bool[batch,1,seq,seq] m", ", float[batch,1,seq,seq] m"])
def test_the_operator_of_opset_23_becomes_one_that_runs_faster(mask: str) -> None:
    named = ", m" if mask else ""
    body = f"o = Attention<scale=0.3>(q, k, v{named}) {MERGE}"
    weights = "int64[3] join = {0,0,32}"
    before = graph(f"{OPERATOR}{mask}) => (float[batch,seq,32] y)", body, weights, 23)
    after, report = fused(before)
    assert report.fused == {"MultiHeadAttention": 1}
    for batch, length in ((1, 4), (3, 6)):
        feeds = {name: draw(batch, 4, length, 8, seed=i) for i, name in enumerate("qkv")}
        if mask:
            # Row 0 of the last one sees nothing, for which onnxruntime gives zeros.
            added = masks(batch, length, -np.inf)
            feeds["m"] = added == 0 if "bool" in mask else added
        assert_same(before, after, feeds)


def test_a_mask_of_two_axes_is_one_for_all() -> None:
    body = f"o = Attention(q, k, v, m) {MERGE}"
    signature = f"{OPERATOR}, bool[seq,seq] m) => (float[batch,seq,32] y)"
    before = graph(signature, body, "int64[3] join = {0,0,32}", 23)
    after, report = fused(before)
    assert report.fused == {"MultiHeadAttention": 1}
    feeds = {name: draw(3, 4, 5, 8, seed=i) for i, name in enumerate("qkv")}
    mask = np.tril(np.ones((5, 5), bool))
    mask[2] = False
    assert_same(before, after, {**feeds, "m": mask})


@pytest.mark.parametrize("shape", ["4,seq,seq", "1,4,seq,seq"])
def test_rows_that_each_head_clears_stay(shape: str) -> None:
    body = f"o = Attention(q, k, v, m) {MERGE}"
    signature = f"{OPERATOR}, bool[{shape}] m) => (float[batch,seq,32] y)"
    before = graph(signature, body, "int64[3] join = {0,0,32}", 23)
    _, report = fused(before)
    assert not report.fused
    assert "head by head" in report.refused[0][2]


def test_a_causal_operator_stays_causal() -> None:
    weights = "int64[3] join = {0,0,32}"
    body = f"o = Attention<is_causal=1>(q, k, v) {MERGE}"
    before = graph(f"{OPERATOR}) => (float[batch,seq,32] y)", body, weights, 23)
    after, report = fused(before)
    assert report.fused == {"MultiHeadAttention": 1}
    assert_same(before, after, {name: draw(2, 4, 5, 8, seed=i) for i, name in enumerate("qkv")})


def test_a_causal_operator_of_other_keys_stays() -> None:
    signature = "(float[batch,4,seq,8] q, float[batch,4,far,8] k, float[batch,4,far,8] v)"
    before = graph(
        signature + " => (float[batch,4,seq,8] y)", "y = Attention<is_causal=1>(q, k, v)", "", 23
    )
    after, report = fused(before)
    assert not report.fused
    assert "causal" in report.refused[0][2]
    assert ir.to_proto(after).graph.node[0].op_type == "Attention"

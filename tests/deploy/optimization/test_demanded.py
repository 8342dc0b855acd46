"""Of tokens that nobody reads nothing is computed, and of those that are read nothing changes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.deploy.optimization.graphs import assert_same, draw, fused, graph, operators
from tests.deploy.optimization.test_attention import FORMS, LOWEST, MERGE, PROJECTIONS, WEIGHTS

ALL = WEIGHTS + (
    ", float[32,32] wo, float[32] bo, float[32] g, float[32] b, float[32,64] wi, float[64] bi, "
    "float[64,32] wf, float[32] bf, int64 first = {0}, int64 end = {-1}, int64[1] one = {0}, "
    "int64[2] two = {0,1}"
)
LAYER = (
    PROJECTIONS
    + FORMS["scores that are divided"]
    + MERGE.replace("y = R", "a0 = R")
    + """ a1 = MatMul(a0, wo) a2 = Add(a1, bo) a3 = Add(a2, x)
    n1 = LayerNormalization<axis=-1>(a3, g, b) f0 = MatMul(n1, wi) f1 = Add(f0, bi) f2 = Gelu(f1)
    f3 = MatMul(f2, wf) f4 = Add(bf, f3) f5 = Add(f4, n1)
    h = LayerNormalization<axis=-1>(f5, g, b) """
)
SIGNATURE = "(float[batch,seq,32] x, float[batch,1,seq,seq] m) => (float[batch,32] y)"


def feeds(batch: int, length: int) -> dict[str, np.ndarray]:
    mask = np.zeros((batch, 1, length, length), np.float32)
    mask[-1, ..., length // 2 :] = LOWEST
    return {"x": draw(batch, length, 32), "m": mask}


@pytest.mark.parametrize("token", ["first", "end"])
def test_the_last_layer_computes_the_token_that_is_read(token: str) -> None:
    before = graph(SIGNATURE, LAYER + f"y = Gather<axis=1>(h, {token})", ALL)
    after, report = fused(before)
    assert report.fused["one token"] == 1
    assert report.fused["MultiHeadAttention"] == 1
    wide = [
        v for n in after.graph for v in n.outputs if n.op_type in ("LayerNormalization", "Gelu")
    ]
    assert len(wide) == 3
    assert all(v.shape is not None and v.shape[1] == 1 for v in wide)
    assert_same(before, after, feeds(1, 1), feeds(1, 5), feeds(3, 6))


def test_an_index_of_one_axis_keeps_the_axis() -> None:
    signature = SIGNATURE.replace("[batch,32]", "[batch,1,32]")
    before = graph(signature, LAYER + "y = Gather<axis=1>(h, one)", ALL)
    after, report = fused(before)
    assert report.fused["one token"] == 1
    assert_same(before, after, feeds(3, 6))


@pytest.mark.parametrize(
    ("more", "signature", "index"),
    [
        ("", SIGNATURE.replace("y)", "y, float[batch,seq,32] h)"), "first"),
        ("mean = ReduceMean(h) ", SIGNATURE.replace("y)", "y, float[1,1,1] mean)"), "first"),
        ("", SIGNATURE.replace("[batch,32]", "[batch,2,32]"), "two"),
    ],
)
def test_tokens_that_others_read_are_computed(more: str, signature: str, index: str) -> None:
    before = graph(signature, LAYER + more + f"y = Gather<axis=1>(h, {index})", ALL)
    after, report = fused(before)
    assert not report.fused["one token"]
    assert_same(before, after, feeds(2, 5))


def test_what_mixes_tokens_is_given_all_of_them() -> None:
    signature = SIGNATURE.replace("float[batch,1,seq,seq] m", "float[9,9] mix")
    body = """t = MatMul(x, wo) s = Softmax<axis=1>(t) f = MatMul(s, wq)
              y = Gather<axis=1>(f, first)"""
    before = graph(signature, body, ALL)
    after, report = fused(before)
    assert report.fused["one token"] == 1
    soft = next(n for n in after.graph if n.op_type == "Softmax")
    assert soft.inputs[0] is not None
    assert soft.outputs[0].shape is not None
    assert soft.outputs[0].shape[1] == "seq"
    assert_same(before, after, {"x": draw(2, 5, 32), "mix": draw(9, 9)})


def test_a_causal_attention_keeps_all_queries() -> None:
    body = PROJECTIONS + "o = Attention<is_causal=1>(q, k, v)" + MERGE.replace("y =", "a =")
    body += " f = MatMul(a, wo) y = Gather<axis=1>(f, end)"
    before = graph("(float[batch,seq,32] x) => (float[batch,32] y)", body, ALL, 23)
    after, report = fused(before)
    assert report.fused["one token"] == 1
    assert report.fused["Attention"] == 1
    assert_same(before, after, {"x": draw(2, 5, 32)})


def test_what_costs_nothing_is_not_moved() -> None:
    body = "t = Relu(x) y = Gather<axis=1>(t, first)"
    before = graph("(float[batch,seq,32] x) => (float[batch,32] y)", body, ALL)
    after, report = fused(before)
    assert not report.fused
    assert operators(after) == operators(before)

"""What patterns are looked for in is settled first, and nothing of its numbers changes."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest

from ortrain import OrtrainWarning
from ortrain.deploy.optimization import OptimizationConfig, fusions
from ortrain.deploy.optimization.fusions import fuse
from tests.deploy.optimization.graphs import answers, assert_same, draw, fused, graph, operators

SIGNATURE = "(float[batch,seq,16] x) => (float[batch,seq,16] y)"


def test_sizes_that_are_known_become_constants() -> None:
    body = """s = Shape(x) i = Constant<value_int=2>() n = Gather(s, i) f = Cast<to=1>(n)
              r = Sqrt(f) y = Div(x, r)"""
    before = graph(SIGNATURE, body)
    after, _ = fused(before)
    assert operators(after) == {"Div": 1}
    assert_same(before, after, {"x": draw(2, 3, 16)})


def test_the_one_unknown_size_of_a_reshape_follows_from_the_others() -> None:
    # As older exporters write heads: [batch, seq, -1, 4] of [batch, seq, 16].
    body = """n = Shape<start=0,end=2>(x) r = Constant<value_ints=[-1, 4]>()
              t = Concat<axis=0>(n, r) a = Reshape(x, t) b = Shape(a)
              i = Constant<value_int=2>() h = Gather(b, i)
              f = Cast<to=1>(h) y = Div(x, f)"""
    before = graph(SIGNATURE, body)
    after, _ = fused(before)
    assert operators(after) == {"Div": 1}
    assert_same(before, after, {"x": draw(2, 3, 16)})


def test_sizes_that_are_open_stay() -> None:
    body = """s = Shape(x) i = Constant<value_int=1>() n = Gather(s, i) f = Cast<to=1>(n)
              y = Div(x, f)"""
    after, _ = fused(graph(SIGNATURE, body))
    assert operators(after) == {"Shape": 1, "Gather": 1, "Cast": 1, "Div": 1}


def test_whole_numbers_are_divided_towards_zero() -> None:
    body = """a = Constant<value_ints=[-7, 7]>() b = Constant<value_ints=[2, -2]>() q = Div(a, b)
              y = Identity(q)"""
    before = graph("(float[1] x) => (int64[2] y)", body)
    after, _ = fused(before)
    assert answers(after, {"x": draw(1)})[0].tolist() == [-3, -3]


def test_a_dropout_that_trains_stays() -> None:
    weights = "float ratio = {0.5}, bool on = {1}, bool off = {0}"
    body = "d = Dropout(x, ratio, on) y = Relu(d)"
    after, _ = fused(graph(SIGNATURE, body, weights))
    assert operators(after)["Dropout"] == 1
    after, _ = fused(graph(SIGNATURE, body.replace("on)", "off)"), weights))
    assert operators(after) == {"Relu": 1}


def test_an_output_that_is_an_input_stays_one() -> None:
    before = graph(SIGNATURE, "y = Identity(x)")
    after, _ = fused(before)
    assert [v.name for v in after.graph.outputs] == ["y"]
    assert_same(before, after, {"x": draw(1, 2, 16)})


def test_weights_that_may_be_fed_are_no_constants() -> None:
    before = graph(SIGNATURE, "d = Mul(half, x) e = Erf(x) y = Mul(d, e)", "float half = {0.5}")
    half = before.graph.initializers["half"]
    before.graph.inputs.append(half)
    after, report = fused(before)
    assert not report.fused
    feeds = {"x": draw(1, 2, 16), "half": np.array(2, np.float32)}
    assert_same(before, after, feeds)


def test_bodies_are_rewritten_too() -> None:
    body = """
        y = If(c) <
            then_branch = then_graph () => (float[batch,seq,16] a) {
                s = Sigmoid(x) a = Mul(x, s) },
            else_branch = else_graph () => (float[batch,seq,16] b) { b = Relu(x) }
        >"""
    signature = "(float[batch,seq,16] x, bool c) => (float[batch,seq,16] y)"
    before = graph(signature, body)
    after, report = fused(before)
    assert report.fused == {"QuickGelu": 1}
    for chosen in (True, False):
        assert_same(before, after, {"x": draw(2, 3, 16), "c": np.array(chosen)})


def test_functions_are_put_in_the_place_of_their_calls() -> None:
    model = ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["" : 20, "own" : 1]>
        g (float[2,16] x) => (float[2,16] y) { y = own.silu(x) }
        <domain: "own", opset_import: ["" : 20]>
        silu (a) => (b) { s = Sigmoid(a) b = Mul(a, s) }
    """)
    before = ir.from_proto(ir.to_proto(model))
    report = fuse(model, OptimizationConfig())
    assert report.fused == {"QuickGelu": 1}
    assert_same(before, model, {"x": draw(2, 16)})


def test_old_opsets_stay_as_they_are() -> None:
    before = graph(SIGNATURE, "s = Sigmoid(x) y = Mul(x, s)", opset=12)
    after, report = fused(before)
    assert not report.fused
    assert report.refused == [("all", "", "opset 12 is older than 13")]
    assert operators(after) == operators(before)


def test_a_fusion_that_fails_leaves_the_graph_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> bool:
        raise AssertionError("of our own")

    broken = dataclasses.replace(fusions.FUSIONS[1], apply=fails)
    monkeypatch.setattr(fusions, "FUSIONS", (broken,))
    before = graph(SIGNATURE, "s = Sigmoid(x) y = Mul(x, s)")
    with pytest.warns(OrtrainWarning, match="'GELU' failed at y"):
        after, report = fused(before)
    assert report.refused == [("GELU", "y", "failed with AssertionError: of our own")]
    assert operators(after) == operators(before)


def test_a_second_run_changes_nothing() -> None:
    before = graph(SIGNATURE, "s = Sigmoid(x) y = Mul(x, s)")
    after, _ = fused(before)
    again, report = fused(after)
    assert not report.fused
    assert operators(again) == operators(after)


def test_no_mark_of_ours_is_left_in_the_file() -> None:
    after, _ = fused(graph(SIGNATURE, "s = Sigmoid(x) y = Mul(x, s)"))
    assert not any(node.metadata_props for node in after.graph)

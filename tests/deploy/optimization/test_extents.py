"""Sizes in the middle of a graph follow from those of its inputs, or stay unknown."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ortrain.deploy.optimization.fusions.extents import Extents
from ortrain.graph import shapes
from tests.deploy.optimization.graphs import answers, assert_same, draw, fused, graph, operators

X = "(float[batch,seq,16] x)"


def known(signature: str, body: str, *names: str, weights: str = "") -> list[tuple[object, ...]]:
    """The sizes of values; a name of ours as what it stands for."""
    model = graph(f"{signature} => (float[a,b,c] y)", f"{body} y = Relu(x)", weights)
    values = {value.name: value for node in model.graph for value in node.outputs}
    Extents(model).follow()
    return [
        tuple(
            d.removeprefix("ortrain: ") if isinstance(d, str) else d
            for d in shapes.dims(values[name]) or ()
        )
        for name in names
    ]


def test_a_target_that_is_computed_tells_the_sizes() -> None:
    body = """s = Shape(x) zero = Constant<value_int=0>() one = Constant<value_ints=[1]>()
        b = Gather(s, zero) n = Gather(s, one) axis = Constant<value_ints=[0]>()
        b1 = Unsqueeze(b, axis) four = Constant<value_ints=[4]>() hole = Constant<value_ints=[-1]>()
        t = Concat<axis=0>(b1, n, four, hole) h = Reshape(x, t)
        k = Transpose<perm=[0,2,1,3]>(h)
        bh = Mul(b, four) t3 = Concat<axis=0>(bh, hole, four) m = Reshape(k, t3)"""
    assert known(X, body, "h", "k", "m") == [
        ("batch", "seq", 4, 4),
        ("batch", 4, "seq", 4),
        ("4*batch", "seq", 4),
    ]


def test_sums_of_sizes_are_followed() -> None:
    body = """c = Concat<axis=1>(p, x) s = Shape<start=1,end=2>(c) r = Constant<value_ints=[-1]>()
        t = Concat<axis=0>(r, s) f = Reshape(c, t)"""
    assert known("(float[batch,seq,16] x, float[batch,past,16] p)", body, "c", "f") == [
        ("batch", "past + seq", 16),
        ("16*batch", "past + seq"),
    ]


def test_the_pattern_of_an_expand_is_seen_through() -> None:
    # Older exporters write torch's -1 of an expand as a choice.
    body = """s = Shape(x) minus = Constant<value_ints=[-1, -1, -1]>() e = Equal(s, minus)
        n = Shape(s) ones = ConstantOfShape<value = int64[1] {1}>(n) w = Where(e, ones, s)
        z = Expand(u, w)"""
    assert known("(float[batch,seq,16] x, float[1,1,16] u)", body, "z") == [("batch", "seq", 16)]


def test_parts_of_an_axis_are_counted() -> None:
    body = """zero = Constant<value_ints=[0]>() one = Constant<value_ints=[1]>()
        far = Constant<value_ints=[9223372036854775807]>() n = Shape<start=1,end=2>(x)
        all = Slice(x, zero, far, one) same = Slice(x, zero, n, one)
        c = Concat<axis=1>(p, x) tail = Slice(c, m, far, one) some = Slice(x, one, far, one)"""
    signature = "(float[batch,seq,16] x, float[batch,past,16] p)"
    body = body.replace("tail =", "m = Shape<start=1,end=2>(p) tail =")
    found = known(signature, body, "all", "same", "tail", "some")
    assert found[:3] == [("batch", "seq", 16)] * 3
    # Of an empty axis nothing is left, which is not one less.
    assert found[3][1] != "seq"
    assert str(found[3][1]).startswith("#")


def test_whole_divisions_are_exact_and_others_are_named() -> None:
    body = """s = Shape<start=2,end=3>(x) two = Constant<value_ints=[2]>() h = Div(s, two)
        n = Shape<start=1,end=2>(x) half = Div(n, two) again = Div(n, two) rest = Mod(n, two)
        a = ConstantOfShape(h) b = ConstantOfShape(half) c = ConstantOfShape(again)
        d = ConstantOfShape(rest)"""
    found = known(X, body, "a", "b", "c", "d")
    assert found[0] == (8,)
    assert found[1] == found[2] == ("Div(seq, 2)",)
    assert found[3] == ("Mod(seq, 2)",)


def test_names_of_a_file_are_what_they_turn_out_to_be() -> None:
    model = graph(
        f"{X} => (float[batch,seq,16] y)",
        "h = Relu(x) k = Sigmoid(h) m = Add(h, k) y = Mul(m, x)",
    )
    for node, names in zip(model.graph, ("a b", "c d", "e f", "batch seq"), strict=True):
        node.outputs[0].shape = ir.Shape([*names.split(), 16])
    Extents(model).follow()
    assert [shapes.dims(node.outputs[0]) for node in model.graph] == [("batch", "seq", 16)] * 4


def test_the_user_may_name_an_output_wrongly() -> None:
    # As where `dynamic_axes` calls the classes of a token its length.
    model = graph(
        "(float[batch,seq,16] x, float[batch,other,16] z) => (float[batch,seq,16] y)",
        "y = Concat<axis=1>(x, z)",
    )
    Extents(model).follow()
    assert shapes.dims(model.graph.outputs[0]) != ("batch", "seq", 16)
    assert shapes.dims(model.graph.inputs[0]) == ("batch", "seq", 16)


def test_a_sum_that_the_user_has_named_has_his_name() -> None:
    model = graph(
        "(float[batch,seq,16] x, float[batch,past,16] p, float[batch,all] m) => "
        "(float[batch,all,16] y)",
        "y = Concat<axis=1>(p, x)",
    )
    Extents(model).follow()
    assert shapes.dims(model.graph.outputs[0]) == ("batch", "all", 16)


def test_axes_without_a_name_differ() -> None:
    model = graph("(float[?,?,16] x, float[?,?,16] z) => (float[?,?,16] y)", "y = Add(x, z)")
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.shape = ir.Shape([None, None, 16])
    extents = Extents(model)
    extents.follow()
    names = [d for value in model.graph.inputs for d in shapes.dims(value) or () if d != 16]
    assert len(set(names)) == 4
    extents.forget()
    assert [shapes.dims(value) for value in model.graph.inputs] == [(None, None, 16)] * 2


def test_a_file_may_use_the_names_that_are_ours() -> None:
    model = graph(
        "(float[batch,seq,16] x, float[past,seq,16] z, float[?,seq,16] u) => (float[a,b,c] y)",
        "y = Concat<axis=0>(x, z, u)",
    )
    wanted = ["ortrain: #1", "ortrain: past + seq", None]
    for value, name in zip(model.graph.inputs, wanted, strict=True):
        value.shape = ir.Shape([name, "seq", 16])
    extents = Extents(model)
    extents.follow()
    first = [(shapes.dims(value) or (None,))[0] for value in model.graph.inputs]
    assert len(set(first)) == 3
    extents.forget()
    first = [(shapes.dims(value) or (None,))[0] for value in model.graph.inputs]
    assert first == wanted


def test_no_name_of_ours_is_left_in_a_file() -> None:
    body = """n = Shape<start=1,end=2>(x) r = Constant<value_ints=[-1]>()
        t = Concat<axis=0>(r, n) f = Reshape(x, t) u = Relu(f) q = Shape(x) y = Reshape(u, q)"""
    before = graph(f"{X} => (float[batch,seq,16] y)", body)
    after, _ = fused(before)
    dims = [
        d
        for node in after.graph
        for value in (*node.inputs, *node.outputs)
        for d in shapes.dims(value) or ()
    ]
    assert not [d for d in dims if isinstance(d, str) and d.startswith("ortrain")]
    assert_same(before, after, {"x": draw(2, 3, 16)})


def test_a_file_whose_inputs_were_made_open_says_what_is_old() -> None:
    body = """s = Shape(h) i = Constant<value_int=0>() b = Gather(s, i) f = Cast<to=1>(b)
        h = Relu(x) y = Mul(h, f)"""
    body = body.replace("h = Relu(x) y", "y").replace("s = Shape", "h = Relu(x) s = Shape")
    before = graph(f"{X} => (float[batch,seq,16] y)", body)
    first = next(iter(before.graph)).outputs[0]
    first.shape = ir.Shape([1, 3, 16])
    after, _ = fused(before)
    assert answers(after, {"x": draw(2, 3, 16)})[0] == pytest.approx(
        2 * np.maximum(draw(2, 3, 16), 0)
    )


def test_targets_that_keep_each_size_in_its_place_are_constants() -> None:
    body = """s = Shape(x) zero = Constant<value_ints=[0]>() one = Constant<value_ints=[1]>()
        b = Gather(s, zero) n = Gather(s, one) h = Constant<value_ints=[4]>()
        t = Concat<axis=0>(b, n, h, h) a = Reshape(x, t) k = Relu(a)
        w = Constant<value_ints=[16]>() back = Concat<axis=0>(b, n, w) y = Reshape(k, back)"""
    before = graph(f"{X} => (float[batch,seq,16] y)", body)
    after, _ = fused(before)
    assert operators(after) == {"Reshape": 2, "Relu": 1}
    for sizes in ((2, 3), (1, 1), (2, 0)):
        assert_same(before, after, {"x": draw(*sizes, 16)})


def test_an_expand_or_a_slice_that_changes_nothing_goes() -> None:
    body = """s = Shape(x) e = Expand(x, s) n = Shape<start=1,end=2>(x)
        zero = Constant<value_ints=[0]>() one = Constant<value_ints=[1]>()
        c = Slice(e, zero, n, one) minus = Constant<value_ints=[-1]>()
        far = Constant<value_ints=[-9223372036854775807]>()
        r = Slice(c, minus, far, one, minus) y = Relu(r)"""
    before = graph(f"{X} => (float[batch,seq,16] y)", body)
    after, _ = fused(before)
    assert operators(after) == {"Slice": 1, "Relu": 1}  # what turns it round stays
    assert_same(before, after, {"x": draw(2, 3, 16)})


def test_what_a_loop_carries_has_no_name() -> None:
    # Its length grows by two with each run, whatever the file calls it.
    body = """t = Constant<value_int=3>() on = Constant<value_int=1>() going = Cast<to=9>(on)
        y = Loop(t, going, x) <body = b (int64 i, bool g, float[batch,seq,16] v)
            => (bool h, float[batch,seq,16] u) {
                h = Identity(g) n = Shape<start=1,end=2>(x) k = Shape<start=1,end=2>(v)
                e = Equal(n, k) s = Squeeze(e) f = Cast<to=1>(s)
                p = Mul(v, f) u = Concat<axis=1>(v, p)
            }>"""
    before = graph(f"{X} => (float[batch,long,16] y)", body)
    after, _ = fused(before)
    assert_same(before, after, {"x": draw(2, 3, 16)})


def test_numbers_beyond_64_bits_are_not_followed() -> None:
    body = """n = Shape<start=1,end=2>(x) far = Constant<value_ints=[9223372036854775807]>()
        one = Constant<value_ints=[1]>() round = Add(far, one) zero = Constant<value_ints=[0]>()
        c = Slice(x, zero, round, one) y = Relu(c)"""
    before = graph(f"{X} => (float[batch,some,16] y)", body)
    after, _ = fused(before)
    found, expected = (answers(each, {"x": draw(2, 3, 16)})[0] for each in (after, before))
    assert found.shape == expected.shape


def test_a_table_of_positions_is_as_long_as_the_text() -> None:
    # Of 512 positions the first are taken; of a longer text, the sum below would fail.
    body = """n = Shape<start=1,end=2>(x) zero = Constant<value_ints=[0]>()
        one = Constant<value_ints=[1]>() p = Slice(table, zero, n, one) h = Add(x, p)
        other = Slice(short, zero, n, one) g = Add(h, other)"""
    weights = "float[1,512,16] table, float[1,8,16] short"
    assert known(X, body, "p", "h", "g", weights=weights) == [
        (1, "Min(512, seq)", 16),
        ("batch", "seq", 16),
        ("batch", "seq", 16),
    ]


def test_a_size_without_a_name_is_asked_of_the_first_value_that_has_it() -> None:
    body = """k = NonZero(flags) r = Transpose(k) i = Squeeze(r, one) s = Gather<axis=1>(x, i)
        q0 = MatMul(s, w) q1 = Reshape(q0, split) q = Transpose<perm=[0,2,1,3]>(q1)
        kt = Transpose<perm=[0,2,3,1]>(q1) t = MatMul(q, kt) u = Add(t, m)
        p = Softmax<axis=-1>(u) o = MatMul(p, q) o1 = Transpose<perm=[0,2,1,3]>(o)
        y = Reshape(o1, join)"""
    signature = "(float[batch,seq,16] x, float[batch,1,1,1] m, bool[seq] flags) => (float[a,b,c] y)"
    weights = (
        "float[16,16] w, int64[4] split = {0,0,4,4}, int64[3] join = {0,0,16}, int64[1] one = {1}"
    )
    before = graph(signature, body, weights)
    after, report = fused(before)
    assert report.fused == {"Attention": 1}
    assert operators(after)["MatMul"] == 0  # none is made for its size alone
    feeds = {"x": draw(2, 5, 16), "m": draw(2, 1, 1, 1), "flags": np.array([1, 0, 1, 1, 0], bool)}
    assert_same(before, after, feeds)

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch.nn import functional

from ortrain.autodiff import differentiate, gradient, no_gradient, status
from ortrain.autodiff.registry import registered
from ortrain.errors import GradientError, GraphError, NoGradientRule, UnsupportedGradient
from ortrain.program import ORIGIN, Phase, Role, phase_of, target_of
from ortrain.testing import check_gradients
from tests.programs import program, run


def names(subject, role):
    return [v.name for v in subject.outputs(role)]


def data(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_a_value_that_is_read_twice_gets_the_sum_of_both_gradients():
    subject = program(lambda op, x: op.Mul(op.Exp(x), op.Sin(x)), {"x": (2, 3)})
    check_gradients(subject, {"x": data(2, 3)}, torch=lambda x: x.exp() * x.sin())


def test_a_node_that_reads_one_value_at_both_inputs_counts_it_twice():
    subject = program(lambda op, x: op.Mul(x, x), {"x": (2, 3)})
    check_gradients(subject, {"x": data(2, 3)}, torch=lambda x: x * x)


def test_many_contributions_are_all_added():
    subject = program(
        lambda op, x: op.Sum(op.Exp(x), op.Sin(x), op.Tanh(x), x, op.Mul(x, x)), {"x": (3,)}
    )
    check_gradients(
        subject, {"x": data(3)}, torch=lambda x: x.exp() + x.sin() + x.tanh() + x + x * x
    )


def test_an_output_that_is_also_an_intermediate_gets_its_own_gradient_too():
    def body(op, x):
        hidden = op.Tanh(x)
        return {"hidden": hidden, "y": op.Exp(hidden)}

    def expected(x):
        hidden = x.tanh()
        return hidden, hidden.exp()

    subject = program(body, {"x": (2, 3)})
    check_gradients(subject, {"x": data(2, 3)}, torch=expected)


def test_two_inputs_that_share_one_gradient_get_an_output_each():
    subject = program(lambda op, a, b: op.Add(a, b), {"a": (2, 3), "b": (2, 3)})
    training = differentiate(subject, ["a", "b"])
    assert names(training, Role.GRADIENT) == ["a.gradient", "b.gradient"]
    dy = data(2, 3)
    results = run(training, {"a": data(2, 3), "b": data(2, 3), "y.gradient": dy})
    np.testing.assert_array_equal(results["a.gradient"], dy)
    np.testing.assert_array_equal(results["b.gradient"], dy)


def test_an_input_that_is_an_output_passes_its_gradient_on():
    def body(op, x):
        return {"y": op.Exp(x), "x": x}

    training = differentiate(program(body, {"x": (3,)}), ["x"])
    feeds = {"x": data(3), "y.gradient": data(3), "x.gradient": data(3)}
    (output,) = training.outputs(Role.GRADIENT)
    assert target_of(output) == "x"
    result = run(training, feeds)[output.name]
    np.testing.assert_allclose(
        result, feeds["y.gradient"] * np.exp(feeds["x"]) + feeds["x.gradient"], rtol=1e-6
    )


def test_only_the_chosen_outputs_receive_a_gradient():
    def body(op, x):
        return {"a": op.Exp(x), "b": op.Sin(x)}

    training = differentiate(program(body, {"x": (3,)}), ["x"], outputs=["b"])
    assert [v.name for v in training.inputs(Role.OUTPUT_GRADIENT)] == ["b.gradient"]
    x, dy = data(3), data(3)
    results = run(training, {"x": x, "b.gradient": dy})
    np.testing.assert_allclose(results["x.gradient"], dy * np.cos(x), rtol=1e-6)


def test_an_output_that_depends_on_nothing_wanted_receives_no_gradient():
    def body(op, x, c):
        return {"y": op.Exp(x), "constant": op.Sin(c)}

    training = differentiate(program(body, {"x": (3,), "c": (3,)}), ["x"])
    assert [v.name for v in training.inputs(Role.OUTPUT_GRADIENT)] == ["y.gradient"]


def test_an_input_without_a_path_has_no_gradient_output():
    subject = program(lambda op, a, b: op.Exp(a), {"a": (3,), "b": (3,)})
    assert names(differentiate(subject, ["a", "b"]), Role.GRADIENT) == ["a.gradient"]


def test_an_integer_output_receives_no_gradient():
    def body(op, x):
        values, places = op.node("TopK", (x, [2]), outputs=2)
        return {"values": values, "places": places}

    training = differentiate(program(body, {"x": (4,)}), ["x"])
    assert [v.name for v in training.inputs(Role.OUTPUT_GRADIENT)] == ["values.gradient"]


def test_no_gradient_flows_through_an_operator_that_is_declared_flat():
    subject = program(lambda op, x: op.Mul(op.Floor(x), x), {"x": (3,)})
    training = differentiate(subject, ["x"])
    x, dy = data(3), data(3)
    result = run(training, {"x": x, "y.gradient": dy})["x.gradient"]
    np.testing.assert_allclose(result, dy * np.floor(x))


def test_a_path_through_flat_operators_alone_is_no_path():
    subject = program(lambda op, x: op.Where(op.Greater(x, 0.0), 1.0, 2.0), {"x": (3,)})
    training = differentiate(subject, ["x"])
    assert names(training, Role.GRADIENT) == []
    assert training.inputs(Role.OUTPUT_GRADIENT) == []


def test_stop_gradient_cuts_its_path_and_no_other():
    def body(op, x):
        return op.Mul(op.node("StopGradient", (op.Exp(x),), domain="ortrain"), x)

    training = differentiate(program(body, {"x": (3,)}), ["x"])
    x, dy = data(3), data(3)
    result = run(training, {"x": x, "y.gradient": dy})["x.gradient"]
    np.testing.assert_allclose(result, dy * np.exp(x), rtol=1e-6)


def test_outputs_of_a_node_that_nothing_reads_count_as_zero():
    def body(op, x):
        first, _, third = op.node("Split", (x,), outputs=3, num_outputs=3)
        return op.Mul(op.Exp(first), third)

    subject = program(body, {"x": (6, 2)})
    check_gradients(
        subject, {"x": data(6, 2)}, torch=lambda x: x[:2].exp() * x[4:], tolerance="sums"
    )


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((2, 3), (3,)),
        ((2, 1), (1, 3)),
        (("n", 3), ("n", 3)),
        (("n", "c"), ("c",)),
        (("n", "c"), ("m", "d")),
        (("n", "c"), ("d",)),
        (("n", 3), (1, 3)),
        ((1, 3), ("n", 3)),
    ],
    ids=str,
)
def test_broadcast_axes_are_summed_whatever_is_known_of_them(a, b):
    sizes = {"n": 2, "c": 3, "m": 1, "d": 3}
    feeds = {k: data(*(sizes.get(d, d) for d in v)) for k, v in {"a": a, "b": b}.items()}
    subject = program(lambda op, a, b: op.Mul(a, b), {"a": a, "b": b})
    check_gradients(subject, feeds, torch=lambda a, b: a * b, tolerance="sums")


def test_one_program_serves_sizes_that_broadcast_and_sizes_that_do_not():
    subject = program(lambda op, a, b: op.Mul(a, b), {"a": ("n", "c"), "b": ("m", "c")})
    for rows in (1, 2):
        feeds = {"a": data(2, 3), "b": data(rows, 3)}
        check_gradients(subject, feeds, torch=lambda a, b: a * b, tolerance="sums")


def test_nothing_is_summed_where_equal_symbols_say_that_nothing_was_broadcast():
    subject = program(lambda op, a, b: op.Mul(a, b), {"a": ("n", "c"), "b": ("n", "c")})
    operators = differentiate(subject, ["a", "b"]).operators()
    assert operators == {"Mul": 3}


def test_the_forward_program_is_left_as_it_is():
    subject = program(lambda op, x: op.LogSoftmax(op.Exp(x)), {"x": (2, 3)})
    before = subject.text()
    differentiate(subject, ["x"])
    assert subject.text() == before


def test_nodes_of_the_backward_say_so_and_carry_the_origin_of_their_forward_node():
    subject = program(lambda op, x: op.Exp(x), {"x": (3,)})
    for node in subject.graph:
        node.metadata_props[ORIGIN] = "layer.1, model.py:7"
    training = differentiate(subject, ["x"])
    backward = [n for n in training.graph if phase_of(n) is Phase.BACKWARD]
    assert [n.op_type for n in backward] == ["Mul"]
    assert backward[0].metadata_props[ORIGIN] == "layer.1, model.py:7"


def test_a_missing_rule_is_an_error_that_says_what_where_why_and_the_way_out():
    def body(op, x):
        return op.Mul(op.node("Det", (op.Exp(x),)), 2.0)

    subject = program(body, {"x": (3, 3)})
    for node in subject.graph:
        node.metadata_props[ORIGIN] = "layer.1, model.py:7"
    with pytest.raises(NoGradientRule) as caught:
        differentiate(subject, ["x"])
    text = str(caught.value)
    assert "no gradient rule for 'Det' (opset 21)" in text
    assert "layer.1, model.py:7" in text
    assert "'x' requires a gradient" in text
    assert '@ortrain.gradient("Det")' in text


def test_an_operator_without_a_rule_beside_the_path_does_no_harm():
    subject = program(lambda op, x, c: op.Mul(x, op.node("Det", (c,))), {"x": (3,), "c": (2, 2)})
    assert names(differentiate(subject, ["x"]), Role.GRADIENT) == ["x.gradient"]


def test_a_form_that_a_rule_does_not_cover_is_an_error_with_the_reason():
    subject = program(
        lambda op, x, u: op.ScatterElements(x, np.array([0, 1]), u, reduction="mul"),
        {"x": (3,), "u": (2,)},
    )
    with pytest.raises(UnsupportedGradient, match="reduction 'mul'"):
        differentiate(subject, ["x"])


def test_an_attribute_that_a_rule_does_not_know_is_refused():
    subject = program(lambda op, x: op.node("Tanh", (x,), steepness=2.0), {"x": (3,)})
    with pytest.raises(UnsupportedGradient, match="does not know the attribute 'steepness'"):
        differentiate(subject, ["x"])


def test_unknown_names_are_errors():
    subject = program(lambda op, x: op.Exp(x), {"x": (3,)})
    with pytest.raises(GraphError, match="no input 'z'"):
        differentiate(subject, ["z"])
    with pytest.raises(GradientError, match="no output 'z'"):
        differentiate(subject, ["x"], outputs=["z"])


def test_a_rule_that_returns_the_wrong_shape_is_caught():
    name = "ortrain.test::WrongShape"
    gradient(name)(lambda g, x: g.op.ReduceSum(g.dy, [0], keepdims=0))
    try:
        subject = program(
            lambda op, x: _like(op.node("WrongShape", (x,), domain="ortrain.test"), x), {"x": (3,)}
        )
        with pytest.raises(AssertionError, match="returns shape"):
            differentiate(subject, ["x"])
    finally:
        _forget(name)


def test_a_rule_that_returns_the_wrong_dtype_is_caught():
    name = "ortrain.test::WrongType"
    gradient(name)(lambda g, x: g.op.Cast(g.dy, to=int(ir.DataType.DOUBLE)))
    try:
        subject = program(
            lambda op, x: _like(op.node("WrongType", (x,), domain="ortrain.test"), x), {"x": (3,)}
        )
        with pytest.raises(AssertionError, match="returns DOUBLE"):
            differentiate(subject, ["x"])
    finally:
        _forget(name)


def test_registering_twice_is_an_error_that_names_the_operator():
    with pytest.raises(GradientError, match="'Exp' is registered twice"):
        gradient("Exp")(lambda g, x: g.dy)
    with pytest.raises(GradientError, match="'Exp' is registered twice"):
        no_gradient("Exp", reason="a test")
    with pytest.raises(GradientError, match="'Floor' is registered twice"):
        gradient("Floor")(lambda g, x: g.dy)


def test_a_rule_of_ones_own_operator_is_used():
    name = "ortrain.test::Triple"
    gradient(name)(lambda g, x: g.dy * 3)
    try:
        assert status(name) == "rule"
        subject = program(
            lambda op, x: _like(op.node("Triple", (x,), domain="ortrain.test"), x), {"x": (3,)}
        )
        assert differentiate(subject, ["x"]).operators()["Mul"] == 1
    finally:
        _forget(name)
    assert status(name) == "missing"


def test_an_operator_of_ours_without_a_rule_differentiates_through_its_body():
    assert "ortrain::Attention" not in registered()
    subject = program(
        lambda op, q, k, v: op.node("Attention", (q, k, v), domain="ortrain", scale=0.5),
        {"q": (2, 3, 4), "k": (2, 5, 4), "v": (2, 5, 4)},
    )
    training = differentiate(subject, ["q"])
    assert "ortrain::Attention" not in training.operators()
    assert training.operators()["Softmax"] == 1


def test_the_row_of_an_embedding_that_pads_gets_no_gradient_as_in_pytorch():
    subject = program(
        lambda op, table, ids: op.node("Embedding", (table, ids), domain="ortrain", padding_idx=1),
        {"table": (4, 3), "ids": (2, 2)}, dtypes={"ids": np.int64},
    )  # fmt: skip
    ids, dy, table = np.array([[1, 0], [2, 1]]), data(2, 2, 3), data(4, 3)
    training = differentiate(subject, ["table"])
    result = run(training, {"table": table, "ids": ids, "y.gradient": dy})["table.gradient"]
    weight = torch.tensor(table, requires_grad=True)
    functional.embedding(torch.tensor(ids), weight, padding_idx=1).backward(torch.tensor(dy))
    np.testing.assert_allclose(result, weight.grad.numpy())
    assert not result[1].any()


@pytest.mark.parametrize("ratio", [0.25, None], ids=["ratio", "default-ratio"])
def test_dropout_of_the_standard_uses_the_mask_that_was_drawn(ratio):
    def body(op, x):
        return op.Dropout(x, None if ratio is None else np.float32(ratio), np.array(True))

    training = differentiate(program(body, {"x": (64, 64)}), ["x"])
    session = onnxruntime.InferenceSession(training.serialize())
    x, dy = np.ones((64, 64), np.float32), data(64, 64)
    y, dx = session.run(None, {"x": x, "y.gradient": dy})
    assert abs((y == 0).mean() - (ratio or 0.5)) < 0.05
    np.testing.assert_allclose(dx, dy * y, rtol=1e-6)


def _like(value, other):
    value.dtype, value.shape = other.dtype, other.shape
    return value


def _forget(name):
    from ortrain.autodiff import registry

    del registry._ENTRIES[registry._key(name)]

"""What has a kernel, what runs by its body instead, and what is missing."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ortrain.errors import ExecutionError, GraphError
from ortrain.program import Role, origin_of, phase_of, role_of
from ortrain.runtime.aten import AtenExecutor, kernels
from ortrain.runtime.aten.refusals import missing, refusals
from ortrain.runtime.aten.table import kernel, serves
from tests.programs import program, run


def test_a_kernel_is_registered_once():
    assert "linear" in kernels.__all__  # it fills the table
    with pytest.raises(GraphError, match="two kernels for MatMul"):
        kernel("MatMul")(lambda t: None)


def test_operators_without_a_kernel_are_named_where_nothing_runs():
    def body(op, x):
        odd = op.node("Odd", (x,), domain="test")
        with op.subgraph("then") as then:
            first = then.returning(then.StringNormalizer(x))
        with op.subgraph("otherwise") as otherwise:
            second = otherwise.returning(otherwise.Neg(x))
        flag = op.Greater(op.Squeeze(x, [0]), 0.0)
        return op.Add(odd, op.If(flag, then_branch=first, else_branch=second))

    lowered = AtenExecutor().lower(program(body, {"x": (1,)}))
    assert missing(lowered) == ["StringNormalizer", "test::Odd"]
    branch = next(node for node in lowered.graph if node.op_type == "If")
    assert not serves(branch), "it holds a node that nothing runs"
    with pytest.raises(ExecutionError, match="serves 'test::Odd'"):
        AtenExecutor().compile(lowered)


def test_sizes_and_constants_need_no_kernel():
    def body(op, x):
        with op.subgraph("then") as then:
            held = ir.Node("", "Constant", [], [ir.AttrFloat32("value_float", 2.0)])
            then.graph.append(held)
            held.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
            first = then.returning(then.Mul(x, held.outputs[0]))
        with op.subgraph("otherwise") as otherwise:
            second = otherwise.returning(otherwise.Neg(x))
        flag = op.Greater(op.cast(op.Size(x), ir.DataType.FLOAT), 2.0)
        result = op.If(flag, then_branch=first, else_branch=second)
        result.type = ir.TensorType(ir.DataType.FLOAT)
        return op.Reshape(result, op.Shape(x))

    subject = program(body, {"x": ("n",)})
    lowered = AtenExecutor().lower(subject)
    assert missing(lowered) == []
    for count in (2, 3):
        feeds = {"x": np.arange(count, dtype=np.float32)}
        (result,) = AtenExecutor().compile(lowered).run([feeds["x"]])
        np.testing.assert_array_equal(result, run(subject, feeds)["y"])


def test_a_form_that_a_kernel_does_not_serve_is_refused():
    def body(op, x, axes):
        result = op.Transpose(op.Squeeze(x, axes))
        result.shape = None
        return result

    subject = program(body, {"x": ("a", "b"), "axes": ("n",)}, dtypes={"axes": np.int64})
    executor = AtenExecutor()
    with pytest.raises(ExecutionError, match=r"rank of .* is not known"):
        executor.compile(executor.lower(subject))


BY_BODY = {
    "BlackmanWindow": lambda op, x: op.BlackmanWindow(np.int64(12)),
    "MeanVarianceNormalization": lambda op, x: op.MeanVarianceNormalization(
        op.Reshape(x, [2, 3, 2]), axes=[0, 2]
    ),
    "Shrink": lambda op, x: op.Shrink(x, lambd=0.3, bias=0.1),
    "Celu": lambda op, x: op.Celu(x, alpha=0.7),
}


@pytest.mark.parametrize("name", BY_BODY)
def test_an_operator_of_others_runs_by_its_body(name):
    def body(op, x):
        result = BY_BODY[name](op, x)
        result.type = ir.TensorType(ir.DataType.FLOAT)
        return result

    subject = program(body, {"x": (12,)})
    feeds = {"x": np.random.default_rng(0).standard_normal(12).astype(np.float32)}
    executor = AtenExecutor()
    lowered = executor.lower(subject)
    assert missing(lowered) == []
    (result,) = executor.compile(lowered).run([feeds["x"]])
    np.testing.assert_allclose(result, run(subject, feeds)["y"], rtol=1e-5, atol=1e-6)


def test_a_body_leaves_names_and_roles_and_says_where_it_comes_from():
    def body(op, x):
        op.origin = "model.py:7 in Model.forward"
        return op.HannWindow(x)

    subject = program(body, {"x": ()}, dtype=np.int64)
    lowered = AtenExecutor().lower(subject)
    assert "HannWindow" not in lowered.operators()
    assert [v.name for v in lowered.graph.outputs] == ["y"]
    assert role_of(lowered.graph.outputs[0]) is Role.USER_OUTPUT
    assert [v.name for v in lowered.graph.inputs] == ["x"]
    (original,) = subject.graph
    assert {origin_of(node) for node in lowered.graph} == {"model.py:7 in Model.forward"}
    assert {phase_of(node) for node in lowered.graph} == {phase_of(original)}
    assert not lowered.model.functions


def test_bodies_run_inside_loops_and_branches_too():
    def body(op, x):
        with op.subgraph("then") as then:
            first = then.returning(then.MeanVarianceNormalization(x))
        with op.subgraph("otherwise") as otherwise:
            second = otherwise.returning(otherwise.Neg(x))
        flag = op.Greater(op.ReduceSum(x, keepdims=0), 0.0)
        result = op.If(flag, then_branch=first, else_branch=second)
        result.type = ir.TensorType(ir.DataType.FLOAT)
        return result

    subject, executor = program(body, {"x": (2, 3, 2, 2)}), AtenExecutor()
    for sign in (1.0, -1.0):
        x = (np.random.default_rng(0).random((2, 3, 2, 2)) * sign).astype(np.float32)
        (result,) = executor.compile(executor.lower(subject)).run([x])
        np.testing.assert_allclose(result, run(subject, {"x": x})["y"], rtol=1e-4, atol=1e-5)


def test_a_kernel_serves_no_attribute_that_it_does_not_know():
    """A later version of an operator may mean something else."""

    def body(op, x):
        return op.node("Erf", (x,), steepness=2.0)

    lowered = AtenExecutor().lower(program(body, {"x": (3,)}))
    assert missing(lowered) == ["Erf"]


def test_what_compile_refuses_is_missing_and_says_why():
    def body(op, x, w):
        first = op.Neg(op.node("Conv", (x, w)))
        return op.Add(first, op.MaxPool(x, kernel_shape=[1] * 4))

    sizes = {"x": (1, 2, 3, 3, 3, 3), "w": (2, 2, 1, 1, 1, 1)}
    executor = AtenExecutor()
    lowered = executor.lower(program(body, sizes))
    reasons = refusals(lowered)
    assert [*reasons] == ["Conv", "MaxPool"]
    assert reasons["Conv"] == "PyTorch has no convolution over 4 axes"
    with pytest.raises(ExecutionError, match="serves 'Conv'"):
        executor.compile(lowered)


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_what_a_graph_says_of_its_origin_is_no_code(end: str) -> None:
    def body(op, x):
        op.origin = f"model.py:7{end}    raise SystemExit"
        return op.Neg(x)

    executor = AtenExecutor()
    x = np.ones(2, np.float32)
    (negated,) = executor.compile(executor.lower(program(body, {"x": (2,)}))).run([x])
    np.testing.assert_array_equal(negated, -x)

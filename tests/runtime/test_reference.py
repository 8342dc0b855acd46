from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx.reference.shape_annotation_checker import ShapeAnnotationError
from torch.nn import functional as F  # noqa: N812

from ortrain.errors import ExecutionError
from ortrain.program import Program
from ortrain.runtime.onnxruntime import OnnxRuntimeExecutor
from ortrain.runtime.reference import ReferenceExecutor
from tests.programs import program, run

RNG = np.random.default_rng(0)


def both(subject, feeds):
    """The first output, from the reference executor and from onnxruntime."""
    session = onnxruntime.InferenceSession(subject.serialize())
    return next(iter(run(subject, feeds).values())), session.run(None, feeds)[0]


def test_outputs_come_in_graph_order():
    subject = program(lambda op, a, b: {"sum": op.Add(a, b), "difference": op.Sub(a, b)},
                      {"a": (2,), "b": (2,)})  # fmt: skip
    compiled = ReferenceExecutor().compile(subject)
    total, difference = compiled.run([np.ones(2, np.float32), np.full(2, 3, np.float32)])
    np.testing.assert_array_equal(total, [4, 4])
    np.testing.assert_array_equal(difference, [-2, -2])


def test_a_wrong_number_of_inputs_is_an_error_that_names_them():
    compiled = ReferenceExecutor().compile(program(lambda op, a, b: op.Add(a, b),
                                                   {"a": (2,), "b": (2,)}))  # fmt: skip
    with pytest.raises(ExecutionError, match="its inputs are a, b"):
        compiled.run([np.ones(2, np.float32)])


def test_lowering_expands_our_operators_and_those_in_their_bodies():
    subject = program(
        lambda op, q, k, v, seed: op.node(
            "Attention", (q, k, v, None, seed), domain="ortrain", scale=1.0, ratio=0.5, stream=1
        ),
        {"q": (2, 3), "k": (4, 3), "v": (4, 3), "seed": ()}, dtypes={"seed": np.int64},
    )  # fmt: skip
    before = subject.text()
    lowered = ReferenceExecutor().lower(subject)
    assert not [name for name in lowered.operators() if name.startswith("ortrain::")]
    assert subject.text() == before


@pytest.mark.parametrize(
    ("body", "function"),
    [
        (lambda op, x: op.Erf(x), torch.erf),
        (lambda op, x: op.Gelu(x), F.gelu),
        (lambda op, x: op.Softmax(x), lambda x: x.softmax(-1)),
        (lambda op, x: op.Selu(x, alpha=1.5, gamma=1.25), lambda x: 1.25 * F.elu(x, 1.5)),
        (lambda op, x: op.Mul(x, 0.1), lambda x: x * 0.1),
        (lambda op, x: op.ReduceLogSumExp(x, [0], keepdims=0), lambda x: x.logsumexp(0)),
    ],
    ids=["Erf", "Gelu", "Softmax", "Selu", "constant", "ReduceLogSumExp"],
)
def test_float64_is_computed_in_float64(body, function):
    x = RNG.standard_normal((3, 4))
    result = run(program(body, {"x": (3, 4)}, dtype=np.float64), {"x": x})["y"]
    assert result.dtype == np.float64
    np.testing.assert_allclose(result, function(torch.tensor(x)).numpy(), rtol=1e-13)


def test_unsigned_arithmetic_wraps_around_without_a_warning():
    subject = program(lambda op, x: op.Mul(x, np.uint32(0x9E3779B1)), {"x": ()}, dtype=np.uint32)
    result = run(subject, {"x": np.array(0xFFFFFFFF, np.uint32)})["y"]
    assert result == (0xFFFFFFFF * 0x9E3779B1) % 2**32


def test_a_shape_that_the_program_states_wrongly_is_found_on_request():
    subject = program(lambda op, x: op.Add(op.Exp(x), 1.0), {"x": ("n",)})
    values = [v for node in subject.graph for v in node.outputs]
    values[0].shape = type(values[0].shape)([7])
    x = np.ones(3, np.float32)
    ReferenceExecutor().compile(subject).run([x])
    with pytest.raises(ShapeAnnotationError):
        ReferenceExecutor().compile(subject, check_annotations=True).run([x])


@pytest.mark.parametrize("mode", ["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"])
@pytest.mark.parametrize("operator", ["Conv", "MaxPool", "AveragePool"])
def test_windows_are_placed_as_onnxruntime_places_them(operator, mode):
    def body(op, x):
        kernel = {"kernel_shape": [2, 3], "strides": [2, 1], "auto_pad": mode}
        if mode == "NOTSET":
            kernel["pads"] = [1, 0, 0, 2]
        if operator == "Conv":
            return op.Conv(x, RNG.standard_normal((3, 2, 2, 3)).astype(np.float32), **kernel)
        return op.node(operator, (x,), **kernel)

    x = RNG.standard_normal((1, 2, 5, 6)).astype(np.float32)
    ours, theirs = both(program(body, {"x": x.shape}), {"x": x})
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("include", [0, 1])
@pytest.mark.parametrize("size", [5, 6, 7])
def test_ceil_mode_lets_the_last_window_hang_over_as_onnxruntime_does(size, include):
    def body(op, x):
        return op.AveragePool(
            x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1], ceil_mode=1,
            count_include_pad=include,
        )  # fmt: skip

    x = RNG.standard_normal((1, 2, size, size)).astype(np.float32)
    ours, theirs = both(program(body, {"x": x.shape}), {"x": x})
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", [0, 1])
def test_indices_of_a_pool_are_those_of_onnxruntime(order):
    def body(op, x):
        _, indices = op.node(
            "MaxPool", (x,), outputs=2, kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1],
            storage_order=order,
        )  # fmt: skip
        return indices

    x = RNG.standard_normal((2, 2, 5, 4)).astype(np.float32)
    ours, theirs = both(program(body, {"x": x.shape}), {"x": x})
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("mode", ["add", "mul", "max", "min"])
def test_scatters_reduce_repeated_places_as_onnxruntime_does(mode):
    x, u = (RNG.standard_normal(s).astype(np.float32) for s in ((4, 3), (5, 3)))
    index = np.array([0, 2, 2, 3, 2])

    def elements(op, x, u):
        rows = np.repeat(index[:, None], 3, 1)
        return op.ScatterElements(x, rows, u, axis=0, reduction=mode)

    def whole(op, x, u):
        return op.ScatterND(x, index[:, None], u, reduction=mode)

    for body in (elements, whole):
        ours, theirs = both(program(body, {"x": x.shape, "u": u.shape}), {"x": x, "u": u})
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_it_is_there_without_torch_and_onnxruntime():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['onnxruntime'] = None\n"
        "import ortrain.testing, ortrain.autodiff, ortrain.runtime.reference"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_loaded_program_runs_as_the_saved_one(tmp_path):
    subject = program(lambda op, x: op.Exp(x), {"x": (3,)})
    subject.save(tmp_path / "model.onnx")
    x = RNG.standard_normal(3).astype(np.float32)
    again = Program.load(tmp_path / "model.onnx")
    np.testing.assert_array_equal(run(again, {"x": x})["y"], run(subject, {"x": x})["y"])


# -- against onnxruntime -------------------------------------------------------------------------

DONE_OVER = {
    "LogSoftmax": lambda op, x: op.LogSoftmax(op.Mul(x, 1e4), axis=1),
    "LRN": lambda op, x: op.LRN(x, size=3, alpha=0.1),
    "GlobalMaxPool": lambda op, x: op.GlobalMaxPool(op.Unsqueeze(x, [4])),
    "LpPool": lambda op, x: op.LpPool(
        x, kernel_shape=[2, 3], strides=[2, 2], pads=[0, 1, 1, 1], ceil_mode=1, p=3
    ),
    "LpPool-dilations": lambda op, x: op.LpPool(x, kernel_shape=[2, 2], dilations=[2, 1]),
    "MaxPool": lambda op, x: op.MaxPool(x, kernel_shape=[2, 2], pads=[1, 1, 1, 1]),
    "ReduceSumSquare": lambda op, x: op.ReduceSumSquare(op.cast(x, ir.DataType.INT32), [1]),
}


@pytest.mark.parametrize("name", DONE_OVER)
def test_what_is_done_over_agrees_with_onnxruntime(name):
    subject = program(DONE_OVER[name], {"x": (2, 5, 4, 5)})
    x = np.random.default_rng(0).standard_normal((2, 5, 4, 5)).astype(np.float32)
    executor = OnnxRuntimeExecutor(threads=1)
    (wanted,) = executor.compile(executor.lower(subject)).run([x])
    found = run(subject, {"x": x})["y"]
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_a_loop_stacks_what_its_steps_give(shape):
    def body(op, x):
        number = ir.Value(name="i", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT64))
        goes_on = ir.Value(name="c", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.BOOL))
        state = ir.Value(name="s", shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
        with op.subgraph("body", [number, goes_on, state]) as inner:
            doubled = inner.Mul(state, 2.0)
            graph = inner.returning(inner.Identity(goes_on), doubled, inner.Identity(doubled))
        _, rows = op.Loop(np.int64(3), np.bool_(True), x, body=graph, outputs=2)
        return rows

    x = np.ones(shape, np.float32)
    executor = ReferenceExecutor()
    (rows,) = executor.compile(executor.lower(program(body, {"x": shape}))).run([x])
    np.testing.assert_array_equal(rows, np.stack([2 * x, 4 * x, 8 * x]))

"""What the lowering to onnxruntime turns into which operators, with the same results."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from ortrain.errors import ExecutionError
from ortrain.graph.scan import scan
from ortrain.runtime.onnxruntime import OnnxRuntimeExecutor
from tests.programs import program, run


def lowered(body, shapes, feeds):
    """Operators of the lowered program, which gives what the program gives."""
    subject, executor = program(body, shapes), OnnxRuntimeExecutor()
    low = executor.lower(subject)
    compiled = executor.compile(low)
    results = compiled.run([feeds[name] for name in compiled.input_names])
    for name, result in zip(compiled.output_names, results, strict=True):
        np.testing.assert_allclose(result, run(subject, feeds)[name], rtol=1e-5, atol=1e-5)
    return [node.op_type for node in low.graph]


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(5, 256), (2, 3, 256), (0, 256), (2, 0, 256)])
def test_a_sum_over_the_rows_of_a_wide_tensor_is_a_product(shape):
    def body(op, x):
        return op.ReduceSum(x, list(range(len(shape) - 1)), keepdims=0)

    symbolic = (*(f"d{i}" for i in range(len(shape) - 1)), 256)
    operators = lowered(body, {"x": symbolic}, {"x": normal(*shape)})
    assert "MatMul" in operators
    assert "ReduceSum" not in operators


@pytest.mark.parametrize(
    ("axes", "keepdims", "width"),
    [([0], 0, 256), ([0, 1], 1, 256), ([0, 1], 0, 255), ([2], 0, 256)],
)
def test_other_sums_stay_sums(axes, keepdims, width, monkeypatch):
    monkeypatch.setattr("ortrain.runtime.onnxruntime.lowering.LONG", 256)

    def body(op, x):
        return op.ReduceSum(x, axes, keepdims=keepdims)

    operators = lowered(body, {"x": ("a", "b", width)}, {"x": normal(2, 3, width)})
    assert operators == ["ReduceSum"]


def test_transposes_and_constant_factors_go_into_the_product():
    def body(op, a, b):
        return op.Transpose(op.MatMul(a * 0.5, op.Transpose(b, perm=[1, 0])) * 0.5, perm=[1, 0])

    feeds = {"a": normal(3, 4), "b": normal(5, 4)}
    assert lowered(body, {"a": ("m", 4), "b": ("n", 4)}, feeds) == ["FusedMatMul"]


@pytest.mark.parametrize("side", ["matrix first", "vector first"])
def test_a_transposed_matrix_times_a_vector_stays_transposed(side):
    def body(op, matrix, vector):
        flipped = op.Transpose(matrix, perm=[1, 0])
        product = (flipped, vector) if side == "matrix first" else (vector, flipped)
        return op.MatMul(*product)

    feeds = {"matrix": normal(4, 4), "vector": normal(4)}
    assert lowered(body, {"matrix": ("n", "n"), "vector": ("n",)}, feeds) == ["Transpose", "MatMul"]


def test_the_body_of_a_loop_absorbs_nothing_from_outside():
    def body(op, x, start, a, b):
        scaled, flipped = op.Mul(a, 0.5), op.Transpose(op.Mul(b, 0.5), perm=[1, 0])
        product = op.MatMul(a, b)

        def step(inner, states, slices):
            sums = inner.Add(inner.MatMul(states[0], scaled), inner.MatMul(slices[0], flipped))
            return (inner.Add(sums, inner.Mul(product, 0.5)),), ()

        return scan(op, step, [start], [x])[0][0]

    shapes = {"x": ("t", 3, 3), "start": (3, 3), "a": (3, 3), "b": (3, 3)}
    feeds = {n: normal(*(4 if d == "t" else d for d in shape)) for n, shape in shapes.items()}
    operators = lowered(body, shapes, feeds)
    assert sorted(operators) == ["MatMul", "Mul", "Mul", "Scan", "Transpose"]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_an_embedding_refuses_negative_indices_as_torchs_does(dtype):
    def body(op, weight, index):
        return op.node("Embedding", (weight, index), domain="ortrain")

    subject = program(body, {"weight": (5, 3), "index": ("n",)}, dtypes={"index": dtype})
    executor = OnnxRuntimeExecutor()
    compiled = executor.compile(executor.lower(subject))
    weight = normal(5, 3)
    (rows,) = compiled.run([weight, np.array([4, 0, 4], dtype)])
    np.testing.assert_array_equal(rows, weight[[4, 0, 4]])
    with pytest.raises(ExecutionError, match="out of data bounds"):
        compiled.run([weight, np.array([4, -1], dtype)])


@pytest.mark.parametrize("target", [[-1, 0], [3, 0]])
def test_a_cross_entropy_refuses_classes_that_do_not_exist(target):
    def body(op, logits, target):
        return op.node("CrossEntropy", (logits, target), domain="ortrain", ignore_index=-2)

    subject = program(body, {"logits": ("n", 3), "target": ("n",)}, dtypes={"target": np.int64})
    executor = OnnxRuntimeExecutor()
    compiled = executor.compile(executor.lower(subject))
    compiled.run([normal(2, 3), np.array([-2, 2])])
    with pytest.raises(ExecutionError, match=r"(?i)out of range"):
        compiled.run([normal(2, 3), np.array(target)])


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("transposed", ["left", "right", "both"])
def test_a_product_over_nothing_is_zero(batch, transposed):
    """onnxruntime's fused product leaves it as the memory was, which a sum has filled before."""
    rank = len(batch) + 2
    flip = [*range(rank - 2), rank - 1, rank - 2]

    def body(op, x, a, b):
        filled = op.ReduceSum(op.Add(x, 7.0), keepdims=0)
        left = op.Transpose(a, perm=flip) if transposed != "right" else a
        right = op.Transpose(b, perm=flip) if transposed != "left" else b
        return op.Mul(op.Mul(op.MatMul(left, right), 0.5), op.Sign(filled))

    sizes = {
        "x": (*batch, 3, 4),
        "a": (*batch, 3, 0) if transposed == "right" else (*batch, 0, 3),
        "b": (*batch, 0, 4) if transposed == "left" else (*batch, 4, 0),
    }
    subject = program(body, sizes)
    executor = OnnxRuntimeExecutor()
    compiled = executor.compile(executor.lower(subject))
    for _ in range(3):
        feeds = {"x": np.ones(sizes["x"], np.float32)} | {n: normal(*sizes[n]) for n in "ab"}
        (found,) = compiled.run([feeds[name] for name in compiled.input_names])
        np.testing.assert_array_equal(found, np.zeros((*batch, 3, 4), np.float32))


@pytest.mark.parametrize("sizes", [(0,), (3, 0), (0, 3), (2, 0, 3)])
@pytest.mark.parametrize("operator", ["ReduceSum", "ReduceProd", "ReduceL2", "ArgMax"])
def test_what_is_empty_is_reduced_over_axes_counted_from_either_end(operator, sizes):
    for axis in range(-len(sizes), len(sizes)):
        if operator == "ArgMax" and not sizes[axis]:
            continue

        def body(op, x, axis=axis):
            if operator == "ArgMax":
                return op.ArgMax(x, axis=axis, keepdims=0)
            return op.node(operator, (x, [axis]), keepdims=0)

        subject = program(body, {"x": sizes})
        executor = OnnxRuntimeExecutor()
        (found,) = executor.compile(executor.lower(subject)).run([np.zeros(sizes, np.float32)])
        rest = [size for i, size in enumerate(sizes) if i != axis % len(sizes)]
        assert found.shape == tuple(rest)


@pytest.mark.parametrize("sizes", [(1,), (0, 1), (1, 2), (2, 1), (1, 3, 1)])
@pytest.mark.parametrize("symbolic", [False, True])
def test_a_size_of_one_expands_to_none(sizes, symbolic):
    """Left to itself onnxruntime takes it away, as if the size stayed."""
    choices = [(1, 0, 2) if size == 1 else (1, size) for size in sizes]
    declared = tuple(f"d{i}" if symbolic and n > 1 else n for i, n in enumerate(sizes))
    targets = [t[i:] for t in itertools.product(*choices) for i in range(len(t))]
    for target in targets:
        subject = program(
            lambda op, x, target=target: op.Neg(op.Expand(op.Neg(x), [*target])), {"x": declared}
        )
        executor = OnnxRuntimeExecutor()
        (found,) = executor.compile(executor.lower(subject)).run([np.ones(sizes, np.float32)])
        assert found.shape == np.broadcast_shapes(sizes, target), target


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("mode", ["constant", "edge", "reflect"])
@pytest.mark.parametrize("seed", range(6))
def test_some_axes_are_padded_between_transposes(seed, mode, late):
    """Left to itself onnxruntime reorders the pads as if they were of all axes, in their order."""
    draw = random.Random(f"{seed} {mode}")
    rank = draw.choice([2, 3, 4])
    count = draw.choice([rank, draw.randint(1, rank)])
    perm, axes = draw.sample(range(rank), rank), draw.sample(range(rank), count)
    axes = [axis - draw.choice([0, rank]) for axis in axes]
    pads = [draw.randint(0, 2) for _ in range(2 * count)]
    sizes = [draw.randint(3, 4) for _ in range(rank)]

    def body(op, x, **given):
        turned = op.Transpose(op.Neg(x), perm=perm)
        padded = op.Pad(turned, given.get("pads", np.array(pads)), None, axes, mode=mode)
        return op.Neg(op.Transpose(padded, perm=np.argsort(perm).tolist()))

    feeds = {"x": normal(*sizes)} | ({"pads": np.array(pads)} if late else {})
    subject = program(body, {n: a.shape for n, a in feeds.items()}, dtypes={"pads": np.int64})
    executor = OnnxRuntimeExecutor()
    (found,) = executor.compile(executor.lower(subject)).run([*feeds.values()])
    (wanted,) = run(subject, feeds).values()
    np.testing.assert_array_equal(found, wanted)

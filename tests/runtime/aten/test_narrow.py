"""Tensors of 16 bits: each kernel rounds its result about once, as PyTorch's own do."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch

from ortrain.runtime.aten import AtenExecutor
from ortrain.runtime.aten.dtypes import DTYPES
from ortrain.runtime.aten.executor import as_array, constant
from tests.cases import FAMILIES
from tests.programs import program, run

NARROW = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
# PyTorch adds up the rows of a loss in their own dtype.
TIMES = {"elementwise": 1.8, "reduce": 1.8, "norm": 1.8, "composite": 1.8, "loss": 10.0}


def computed(subject, feeds):
    executor = AtenExecutor()
    compiled = executor.compile(executor.lower(subject))
    return compiled.run([feeds[value.name] for value in subject.graph.inputs])


def in_float64(arrays, like):
    return {
        name: np.asarray(array).astype(like[name].dtype) if like[name].dtype.kind == "f" else array
        for name, array in arrays.items()
    }


CASES = [
    (family, case)
    for family in TIMES
    for case in FAMILIES[family]
    if case.id != "Dropout-training"  # it draws as it likes, and has no kernel
]


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize(("family", "case"), CASES, ids=[case.id for _, case in CASES])
def test_a_case(family, case, name):
    opset = case.tried_opsets()[-1]
    subject, feeds = case.build(NARROW[name], opset)
    exact, wide = case.build(np.dtype(np.float64), opset)
    wanted = run(exact, in_float64(feeds, wide))
    for value, result in zip(subject.graph.outputs, computed(subject, feeds), strict=True):
        true = wanted[value.name]
        assert result.shape == true.shape
        assert value.dtype is None or result.dtype == value.dtype.numpy()
        if true.dtype.kind == "f":
            error = np.abs(result.astype(np.float64) - true).max(initial=0.0)
            bound = TIMES[family] * ROUNDING[name] * np.abs(true).max(initial=0.0)
            assert error <= bound
        else:
            np.testing.assert_array_equal(result, true)


def far_from_zero(seed, *shape, dtype):
    """Rows whose mean is large beside their deviation, which 16 bits of a statistic cannot hold."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) + 8.0).astype(dtype)


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("parameters", ["same", "float32"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_normalization_returns_statistics_of_float32(name, parameters, has_bias):
    dtype = NARROW[name]
    beside = np.dtype(np.float32) if parameters == "float32" else dtype
    shapes = {"x": ("n", 64), "scale": (64,), **({"bias": (64,)} if has_bias else {})}

    def body(op, x, scale, bias=None):
        y, mean, inverse = op.LayerNormalization(x, scale, bias, outputs=3)
        return {"y": y, "mean": op.Identity(mean), "inverse": op.Identity(inverse)}

    subject = program(body, shapes, dtypes={"x": dtype, "scale": beside, "bias": beside})
    for value in subject.graph.outputs[1:]:
        value.type = ir.TensorType(ir.DataType.FLOAT)
    feeds = {k: far_from_zero(i, 5 if k == "x" else 64, *([64] if k == "x" else []),
                              dtype=dtype if k == "x" else beside)
             for i, k in enumerate(shapes)}  # fmt: skip
    feeds["scale"] = (feeds["scale"].astype(np.float32) - 8).astype(beside)
    y, mean, inverse = computed(subject, feeds)
    assert (y.dtype, mean.dtype, inverse.dtype) == (dtype, np.float32, np.float32)
    wide = {name: array.astype(np.float64) for name, array in feeds.items()}
    true_mean = wide["x"].mean(-1, keepdims=True)
    true_inverse = 1 / np.sqrt(wide["x"].var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(mean, true_mean, rtol=1e-6)
    np.testing.assert_allclose(inverse, true_inverse, rtol=1e-5)
    true = (wide["x"] - true_mean) * true_inverse * wide["scale"] + wide.get("bias", 0.0)
    np.testing.assert_allclose(
        y.astype(np.float64), true, rtol=0, atol=1.1 * ROUNDING[name] * np.abs(true).max()
    )


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("running", [False, True])
def test_batch_normalization_takes_its_statistics_in_float32(name, affine, running):
    dtype = NARROW[name]
    names = ["x", *["weight", "bias"] * affine, *["mean", "var"] * running]

    def body(op, x, weight=None, bias=None, mean=None, var=None):
        results = op.node(
            "BatchNorm", (x, weight, bias, mean, var), domain="ortrain", outputs=5, momentum=0.25
        )
        return {f"y{i}": result for i, result in enumerate(results)}

    shapes = {name: (6, 3, 5) if name == "x" else (3,) for name in names}
    subject = program(body, shapes, dtype=dtype)
    feeds = {k: far_from_zero(i, *shapes[k], dtype=dtype) for i, k in enumerate(names)}
    results = computed(subject, feeds)
    assert [r.dtype for r in results] == [dtype, np.float32, np.float32, dtype, dtype]
    wide = {name: array.astype(np.float64) for name, array in feeds.items()}
    mean, variance = wide["x"].mean((0, 2)), wide["x"].var((0, 2))
    inverse = 1 / np.sqrt(variance + 1e-5)
    y = (wide["x"] - mean[:, None]) * inverse[:, None]
    y = y * wide["weight"][:, None] + wide["bias"][:, None] if affine else y
    moved = 0.25 * mean + 0.75 * wide["mean"] if running else mean
    spread = 0.25 * variance * 30 / 29 + 0.75 * wide["var"] if running else variance
    bounds = [ROUNDING[name] * 1.1, 1e-6, 1e-5, ROUNDING[name] * 1.1, ROUNDING[name] * 1.1]
    for found, true, bound in zip(results, (y, mean, inverse, moved, spread), bounds, strict=True):
        np.testing.assert_allclose(
            found.astype(np.float64), true, rtol=0, atol=bound * np.abs(true).max()
        )


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_as_near_as_pytorchs(name, reduction, smoothing):
    def body(op, logits, target):
        return op.node(
            "CrossEntropy", (logits, target), domain="ortrain", reduction=reduction,
            label_smoothing=smoothing, outputs=2,
        )[0]  # fmt: skip

    subject = program(
        body, {"logits": (40, 30), "target": (40,)}, dtype=NARROW[name], dtypes={"target": np.int64}
    )
    rng = np.random.default_rng(0)
    logits = torch.tensor(rng.standard_normal((40, 30)) * 3, dtype=getattr(torch, name))
    target = torch.tensor(np.where(rng.random(40) < 0.2, -100, rng.integers(0, 30, 40)))
    array = logits.float().numpy().astype(NARROW[name])
    (found,) = computed(subject, {"logits": array, "target": target.numpy()})
    loss = torch.nn.functional.cross_entropy
    options = {"reduction": reduction, "label_smoothing": smoothing}
    true = loss(logits.double(), target, **options).numpy()
    eager = loss(logits, target, **options).double().numpy()
    scale = np.abs(true).max()
    bound = np.abs(eager - true).max() + 2 * ROUNDING[name] * scale
    assert np.abs(found.astype(np.float64) - true).max() <= bound


@pytest.mark.parametrize("sizes", [(), (1,), (2, 3)])
@pytest.mark.parametrize("operator", ["Add", "Sub", "Mul", "Div", "Pow"])
@pytest.mark.parametrize("name", NARROW)
def test_a_result_keeps_its_dtype_beside_a_number(name, operator, sizes):
    """A number of float32 decides about the dtype where the other operand has no axes either."""
    narrow = ir.DataType.from_numpy(NARROW[name])

    def body(op, x):
        number = np.float32(1.7)
        after = op.node(operator, (op.cast(x, ir.DataType.FLOAT), number))
        before = op.node(operator, (number, op.cast(x, ir.DataType.FLOAT)))
        return {"y": op.cast(after, narrow), "z": op.cast(before, narrow)}

    feeds = {"x": np.full(sizes, 1.5).astype(NARROW[name])}
    subject = program(body, {"x": sizes}, dtype=NARROW[name])
    wanted = run(subject, feeds)
    executor = AtenExecutor()
    compiled = executor.compile(executor.lower(subject))
    results = compiled.run_values([constant(feeds["x"], narrow)])
    for value, result in zip(subject.graph.outputs, results, strict=True):
        assert result.dtype is DTYPES[narrow], compiled.source
        np.testing.assert_array_equal(as_array(result, narrow), wanted[value.name])


STATE = {"weight": (3,), "bias": (3,), "mean": (3,), "var": (3,)}


def batch_norm_in_float32(is_read=False):
    """As autocast's: the image is of 16 bits, weights and statistics are float32."""

    def body(op, x, weight, bias, mean, var):
        wide = op.cast(x, ir.DataType.FLOAT)
        y, *_, new_mean, new_var = op.node(
            "BatchNorm", (wide, weight, bias, mean, op.Exp(var)), domain="ortrain", outputs=5
        )
        y.shape, y.dtype = ir.Shape((4, 3, 5, 5)), ir.DataType.FLOAT
        results = {"y": op.cast(y, x.dtype), "new_mean": new_mean, "new_var": new_var}
        return {**results, "z": op.Identity(y)} if is_read else results

    return body


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("name", NARROW)
def test_a_norm_over_a_batch_needs_no_casts_unless_somebody_reads_float32(name, is_read):
    dtype = NARROW[name]
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((4, 3, 5, 5)).astype(dtype)}
    feeds |= {key: rng.standard_normal(n).astype(np.float32) for key, n in STATE.items()}
    shapes = {"x": (4, 3, 5, 5), **STATE}
    subject = program(batch_norm_in_float32(is_read), shapes, dtypes={"x": dtype})
    executor = AtenExecutor()
    compiled = executor.compile(executor.lower(subject))
    assert (".to(" in compiled.source) is is_read, compiled.source
    found = compiled.run([feeds[value.name] for value in subject.graph.inputs])
    wanted = run(subject, feeds)
    for value, result in zip(subject.graph.outputs, found, strict=True):
        true = wanted[value.name].astype(np.float64)
        bound = (ROUNDING[name] if value.name == "y" else 1e-6) * np.abs(true).max()
        assert np.abs(result.astype(np.float64) - true).max() <= 1.5 * bound, value.name


@pytest.mark.parametrize("name", NARROW)
def test_so_do_its_gradients(name):
    dtype = NARROW[name]

    def body(op, dy, x, weight, mean, var):
        wide = [op.cast(v, ir.DataType.FLOAT) for v in (dy, x)]
        dx, dw, db = op.node(
            "BatchNormGradient", (*wide, weight, mean, op.Exp(var)), domain="ortrain", outputs=3
        )
        dx.shape, dx.dtype = ir.Shape((4, 3, 5, 5)), ir.DataType.FLOAT
        return {"dx": op.cast(dx, x.dtype), "dw": dw, "db": db}

    rng = np.random.default_rng(0)
    feeds = {key: rng.standard_normal((4, 3, 5, 5)).astype(dtype) for key in ("dy", "x")}
    state = {key: n for key, n in STATE.items() if key != "bias"}
    feeds |= {key: rng.standard_normal(n).astype(np.float32) for key, n in state.items()}
    shapes = {"dy": (4, 3, 5, 5), "x": (4, 3, 5, 5), **state}
    subject = program(body, shapes, dtypes={"x": dtype, "dy": dtype})
    executor = AtenExecutor()
    compiled = executor.compile(executor.lower(subject))
    assert ".to(" not in compiled.source
    found = compiled.run([feeds[value.name] for value in subject.graph.inputs])
    wanted = run(subject, feeds)
    for value, result in zip(subject.graph.outputs, found, strict=True):
        true = wanted[value.name].astype(np.float64)
        bound = (ROUNDING[name] if value.name == "dx" else 1e-5) * np.abs(true).max()
        assert np.abs(result.astype(np.float64) - true).max() <= 1.5 * bound, value.name

"""Where PyTorch and ONNX mean other things, or one of them nothing: empty, unsigned, uneven."""

from __future__ import annotations

import itertools
import random

import ml_dtypes
import numpy as np
import pytest

from ortrain.runtime.aten import AtenExecutor
from tests.programs import program
from tests.runtime.agreement import agree

WHOLE = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)
FLOATING = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)


def numbers(dtype, *shape, seed=0):
    """Small whole numbers; of an unsigned dtype some with its top bit as well."""
    rng, dtype = np.random.default_rng(seed), np.dtype(dtype)
    found = rng.integers(0 if dtype.kind == "u" else -5, 6, shape)
    if dtype.kind == "u":
        found = np.where(rng.random(shape) < 0.3, np.iinfo(dtype).max - found.astype(dtype), found)
    return np.asarray(found).astype(dtype)


# -- nothing -------------------------------------------------------------------------------------

EXTREMES = list(itertools.product(("ReduceMax", "ReduceMin"), (*FLOATING, *WHOLE, np.bool_)))


@pytest.mark.parametrize("axes", [[1], [0, 1], [-1, 1], [0]])
@pytest.mark.parametrize(("operator", "dtype"), EXTREMES)
def test_the_extreme_of_nothing_is_the_end_of_the_dtype(operator, dtype, axes):
    def body(op, x):
        form = {"keepdims": len(axes) - 1}
        return op.node(operator, (x, op.constant(np.array(axes))), **form)

    agree(body, {"x": np.zeros((2, 0, 3), dtype)}, opset=20)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3), (2, 0, 3)])
def test_what_runs_along_an_axis_of_nothing_gives_nothing(shape):
    x = np.zeros(shape, np.float32)
    for axis in range(len(shape)):
        agree(lambda op, x, axis=axis: op.Softmax(x, axis=axis), {"x": x})
        agree(lambda op, x, axis=axis: op.CumSum(x, np.int64(axis), exclusive=1), {"x": x})
        if shape[axis]:
            agree(lambda op, x, axis=axis: op.Hardmax(x, axis=axis), {"x": x})


def scaled(operator):
    def body(op, x):
        ones = op.Expand(np.float32(1), op.Shape(x, start=1, end=2))
        return op.node(operator, (x, ones, ones))

    return body


def windowed(operator, **form):
    def body(op, x):
        rank = len(x.shape) - 2
        more = {name: value * rank for name, value in form.items() if name != "outputs"}
        if form.get("outputs") != 2:
            return op.node(operator, (x,), kernel_shape=[2] * rank, **more)
        y, places = op.node(operator, (x,), kernel_shape=[2] * rank, outputs=2, **more)
        return {"y": y, "places": places}

    return body


def around(mode, axes):
    return lambda op, x: op.Pad(x, [1, 1] * len(axes), None, axes, mode=mode)


IMAGES = {
    f"{operator} {form}": windowed(operator, **form)
    for operator in ("MaxPool", "AveragePool", "LpPool")
    for form in ({}, {"strides": [2]}, {"dilations": [2]}, {"pads": [1, 0]}, {"pads": [1, 1]})
} | {
    "MaxPool with places": windowed("MaxPool", outputs=2),
    "MaxPool with places and pads": windowed("MaxPool", pads=[1, 0], outputs=2),
    "InstanceNormalization": scaled("InstanceNormalization"),
    **{f"Pad {m} {a}": around(m, a) for m in ("edge", "reflect") for a in ([-1], [2])},
}


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("image", IMAGES)
def test_images_of_no_batch_or_no_channels(image, rank):
    for shape in ((0, 2), (2, 0), (0, 0)):
        agree(IMAGES[image], {"x": np.zeros((*shape, *[5] * rank), np.float32)})


@pytest.mark.parametrize("mode", ["edge", "reflect"])
def test_copies_are_put_around_any_axis_of_what_is_empty(mode):
    for shape in itertools.product((0, 2, 3), repeat=3):
        for axis in (i for i in range(3) if shape[i]):
            body = around(mode, [axis])
            agree(body, {"x": np.ones(shape, np.float32)})


@pytest.mark.parametrize("shape", [(0, 2), (2, 0), (0,), (0, 2, 3), (2, 0, 1)])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_nothing_is_resized(mode, shape):
    """The reference resizes no image of no elements."""
    for rank in (1, 2):
        axes, sizes = [*range(len(shape), len(shape) + rank)], (*shape, *[4] * rank)
        for declared in (sizes, tuple(f"d{i}" for i in range(len(sizes)))):
            subject = program(
                lambda op, x, axes=axes: op.Resize(
                    x, None, None, np.array([3] * len(axes)), axes=axes, mode=mode
                ),
                {"x": declared},
            )
            executor = AtenExecutor()
            compiled = executor.compile(executor.lower(subject))
            (found,) = compiled.run([np.zeros(sizes, np.float32)])
            assert found.shape == (*shape, *[3] * rank)


@pytest.mark.parametrize(("shape", "axis"), [((0,), 0), ((2, 0), 1), ((3, 0, 2), -2)])
def test_the_hardest_of_nothing_is_nothing(shape, axis):
    """The reference cannot say which it is."""
    subject, executor = (
        program(lambda op, x: op.Hardmax(x, axis=axis), {"x": shape}),
        AtenExecutor(),
    )
    (result,) = executor.compile(executor.lower(subject)).run([np.zeros(shape, np.float32)])
    assert result.shape == shape


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
def test_rows_of_nothing_are_scattered(reduction):
    data, updates = np.zeros((2, 4, 0), np.float32), np.zeros((3, 0), np.float32)
    places = np.array([[0, 1], [1, -1], [0, 3]])
    agree(lambda op, x, i, u: op.ScatterND(x, i, u, reduction=reduction),
          {"x": data, "i": places, "u": updates})  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.int64, np.uint32])
def test_a_product_over_nothing_is_what_is_added_to_it(dtype):
    a, b, c = numbers(dtype, 3, 0), numbers(dtype, 0, 2), numbers(dtype, 2)
    agree(lambda op, a, b, c: op.Gemm(a, b, c), {"a": a, "b": b, "c": c})


def test_a_channel_of_one_number_has_no_variance():
    given = {name: np.array([0.5, 1.5, 2.0], np.float64) for name in ("s", "b", "m", "v")}
    agree(
        lambda op, x, s, b, m, v: dict(
            zip("yMV", op.BatchNormalization(x, s, b, m, v, training_mode=1, outputs=3),
                strict=True)),
        {"x": np.array([[1.0, 2.0, 3.0]])[..., None], **given}, tolerance=1e-7,
    )  # fmt: skip


# -- whole numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint32])  # and uint64, which the reference takes as floating
def test_unsigned_numbers_are_none_below_zero(dtype):
    x, slope = numbers(dtype, 2, 5), numbers(dtype, 5, seed=1)
    agree(lambda op, x, s: op.PRelu(x, s), {"x": x, "s": slope})


@pytest.mark.parametrize("dtype", [d for d in WHOLE if np.dtype(d).kind == "u"])
@pytest.mark.parametrize("number", [1, 3, -1])
@pytest.mark.parametrize("operator", ["Div", "Mod"])
def test_unsigned_constants_divide(dtype, operator, number):
    x, constant = numbers(dtype, 7), np.array(number % 2 ** (8 * np.dtype(dtype).itemsize), dtype)
    agree(lambda op, x: op.node(operator, (x, op.constant(constant))), {"x": x})
    positive = np.maximum(x, 1)
    agree(lambda op, x: op.node(operator, (op.constant(constant), x)), {"x": positive})


@pytest.mark.parametrize("dtype", [d for d in WHOLE if np.dtype(d).kind == "i"])
@pytest.mark.parametrize(("bias", "lambd"), [(0.0, 0.5), (0.5, 0.25), (1.0, 2.0), (0.25, 0.25)])
def test_shrinking_keeps_the_dtype_of_whole_numbers(dtype, bias, lambd):
    agree(lambda op, x: op.Shrink(x, bias=bias, lambd=lambd), {"x": numbers(dtype, 9)})


@pytest.mark.parametrize("seed", range(20))
def test_places_of_maxima_of_whole_numbers_lie_inside(seed):
    """The least number of the dtype, in the image, is what is around it as well."""
    draw = random.Random(seed)
    dtype, rank = draw.choice([np.uint8, np.int8]), draw.choice([1, 2])
    kernel = [draw.randint(2, 3) for _ in range(rank)]
    pads = [draw.randint(0, k - 1) for k in kernel * 2]
    image = np.full((1, 2, *[5] * rank), np.iinfo(dtype).min, dtype)
    image[..., draw.randrange(5)] = 3
    agree(
        lambda op, x: dict(
            zip("yi", op.MaxPool(x, kernel_shape=kernel, pads=pads, strides=[2] * rank, outputs=2),
                strict=True)),
        {"x": image},
    )  # fmt: skip


# -- axes and windows ----------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("axes", [[0, 1], [1, 0], [2, 0], [-1, 0], [0, -1, 1], [1, -3]])
@pytest.mark.parametrize("operator", ["ReduceProd", "ReduceSum", "ReduceMax", "ReduceL2"])
def test_axes_that_come_late_are_taken_in_any_order(operator, axes, keep):
    x = np.random.default_rng(0).random((2, 3, 4)).astype(np.float32)
    agree(lambda op, x, axes: op.node(operator, (x, axes), keepdims=keep),
          {"x": x, "axes": np.array(axes)}, tolerance=1e-6, symbolic=False)  # fmt: skip


@pytest.mark.parametrize("counts", [0, 1])
@pytest.mark.parametrize("seed", range(12))
def test_windows_larger_than_the_image_are_averaged(seed, counts):
    """PyTorch refuses them over three axes, whatever is around the image."""
    draw = random.Random(seed)
    kernel = [draw.randint(2, 3) for _ in range(3)]
    sizes = [draw.randint(1, 3) for _ in range(3)]
    pads = [
        draw.randint(max(0, (k - n + 1) // 2), k - 1) for k, n in zip(kernel, sizes, strict=True)
    ] * 2
    image = np.random.default_rng(seed).standard_normal((1, 2, *sizes)).astype(np.float32)
    agree(lambda op, x: op.AveragePool(
        x, kernel_shape=kernel, pads=pads, count_include_pad=counts, strides=[2, 1, 2]),
        {"x": image}, tolerance=1e-6)  # fmt: skip


@pytest.mark.parametrize("p", [1, 2])
def test_a_norm_beyond_float16_divides(p):
    x = np.array([[9000, 39000, -36000, 11000], [0, 0, 0, 0]], np.float16)
    agree(lambda op, x: op.LpNormalization(x, axis=1, p=p), {"x": x}, tolerance=2e-3, opset=22)

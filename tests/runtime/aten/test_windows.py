"""Convolutions and pools in forms that PyTorch's kernels do not take as they are."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ortrain.errors import ExecutionError
from ortrain.runtime.aten import AtenExecutor
from tests.programs import program
from tests.runtime.agreement import agree


def floats(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def window(draw, rank, *, largest=3):
    """A random window, and an image that it fits into."""
    kernel = [draw.randint(1, largest) for _ in range(rank)]
    form = {
        "strides": [draw.randint(1, 3) for _ in range(rank)],
        "dilations": [draw.choice([1, 1, 2]) for _ in range(rank)],
    }
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, form["dilations"], strict=True)]
    sizes = [span + draw.randint(0, 4) for span in spans]
    kind = draw.choice(["even", "uneven", "SAME_UPPER", "SAME_LOWER", "VALID"])
    if kind == "even":
        form["pads"] = [draw.randint(0, k - 1) for k in kernel] * 2
    elif kind == "uneven":
        form["pads"] = [draw.randint(0, k - 1) for k in kernel * 2]
    else:
        form["auto_pad"] = kind
    return kernel, sizes, form


@pytest.mark.parametrize("seed", range(40))
def test_convolutions(seed):
    draw = random.Random(seed)
    rank, group = draw.choice([1, 2, 2, 3]), draw.choice([1, 1, 2])
    kernel, sizes, form = window(draw, rank)
    x, w = floats(2, 2 * group, *sizes), floats(3 * group, 2, *kernel, seed=1)
    agree(
        lambda op, x, w, b: op.Conv(x, w, b, kernel_shape=kernel, group=group, **form),
        {"x": x, "w": w, "b": floats(3 * group)}, tolerance=1e-5,
    )  # fmt: skip
    agree(lambda op, x, w: op.Conv(x, w, group=group, **form), {"x": x, "w": w}, tolerance=1e-5)


@pytest.mark.parametrize("seed", range(60))
def test_transposed_convolutions(seed):
    draw = random.Random(seed)
    rank, group = draw.choice([1, 2, 2, 3]), draw.choice([1, 1, 2])
    kernel, sizes, form = window(draw, rank)
    steps = zip(form["strides"], form["dilations"], strict=True)
    if draw.random() < 0.5:
        # Up to two more than PyTorch takes.
        form["output_padding"] = [draw.randint(0, max(pair) + 1) for pair in steps]
    if draw.random() < 0.5:
        extra = form.get("output_padding", [0] * rank)
        rows = zip(sizes, kernel, form["strides"], form["dilations"], extra, strict=True)
        full = [(n - 1) * s + (k - 1) * d + 1 + more for n, k, s, d, more in rows]
        form.pop("pads", None)
        form["output_shape"] = [n - draw.randint(-4, min(3, n - 1)) for n in full]
    x, w = floats(2, 2 * group, *sizes), floats(2 * group, 3, *kernel, seed=1)
    agree(
        lambda op, x, w, b: op.ConvTranspose(x, w, b, kernel_shape=kernel, group=group, **form),
        {"x": x, "w": w, "b": floats(3 * group)}, tolerance=1e-5,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_maxima_and_where_they_are(seed):
    draw = random.Random(seed)
    rank = draw.choice([1, 2, 2, 3])
    kernel, sizes, form = window(draw, rank)
    if draw.random() < 0.4:
        form["ceil_mode"] = 1
    dtype = draw.choice([np.float32, np.float64, np.float16, np.uint8, np.int8])
    count = 4 * int(np.prod(sizes))
    x = np.random.default_rng(seed).permutation(count).reshape(2, 2, *sizes)
    x = (x % 251 - (0 if dtype is np.uint8 else 125)).astype(dtype)

    def body(op, x):
        y, places = op.MaxPool(x, outputs=2, kernel_shape=kernel, **form)
        return {"values": y, "places": places}

    agree(body, {"x": x})
    agree(lambda op, x: op.MaxPool(x, kernel_shape=kernel, **form), {"x": x})
    form["storage_order"] = 1
    if x.dtype.kind == "f":
        agree(body, {"x": x})


@pytest.mark.parametrize("seed", range(60))
def test_averages(seed):
    draw = random.Random(seed)
    rank = draw.choice([1, 2, 2, 3])
    kernel, sizes, form = window(draw, rank)
    form["count_include_pad"] = draw.randint(0, 1)
    if draw.random() < 0.4:
        form["ceil_mode"] = 1
    agree(
        lambda op, x: op.AveragePool(x, kernel_shape=kernel, **form),
        {"x": floats(2, 2, *sizes)}, tolerance=1e-6,
    )  # fmt: skip


@pytest.mark.parametrize("p", [1, 2, 3])
def test_norms_of_windows(p):
    x = floats(2, 3, 5, 6)
    agree(lambda op, x: op.LpPool(x, kernel_shape=[2, 3], strides=[1, 2], p=p), {"x": x},
          tolerance=1e-5)  # fmt: skip
    subject = program(lambda op, x: op.GlobalLpPool(x, p=p), {"x": x.shape})
    executor = AtenExecutor()
    (result,) = executor.compile(executor.lower(subject)).run([x])
    wanted = (np.abs(x) ** p).sum((2, 3), keepdims=True) ** (1 / p)
    np.testing.assert_allclose(result, wanted, rtol=1e-5)


def test_norms_of_windows_over_an_edge():
    """onnx.reference takes what is outside out of the sum, and counts it all the same."""
    x = floats(1, 1, 4)
    subject = program(
        lambda op, x: op.LpPool(x, kernel_shape=[3], strides=[3], pads=[2, 1], p=2), {"x": x.shape}
    )
    executor = AtenExecutor()
    (result,) = executor.compile(executor.lower(subject)).run([x])
    flat = x.reshape(-1)
    wanted = [np.sqrt((part**2).sum()) for part in (flat[:1], flat[1:4])]
    np.testing.assert_allclose(result.reshape(-1), wanted, rtol=1e-6)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_maxima_put_back(rank):
    kernel, strides = [2, 3, 2][:rank], [2, 3, 1][:rank]
    x = np.random.default_rng(0).permutation(2 * 3 * 6**rank).reshape(2, 3, *[6] * rank)
    form = {"kernel_shape": kernel, "strides": strides}

    def body(op, x):
        y, places = op.MaxPool(x, outputs=2, **form)
        return op.MaxUnpool(y, places, **form)

    agree(body, {"x": x.astype(np.float32)})

    def larger(op, x):
        y, places = op.MaxPool(x, outputs=2, **form)
        return op.MaxUnpool(y, places, np.array([2, 3, *[8] * rank]), **form)

    agree(larger, {"x": x.astype(np.float32)})


@pytest.mark.parametrize("seed", range(20))
def test_blocks_put_back(seed):
    draw = random.Random(seed)
    rank = draw.choice([1, 2, 2, 3])
    block, image, form = window(draw, rank)
    form.pop("auto_pad", None)
    pads = form.get("pads", [0] * (2 * rank))
    rows = zip(image, block, form["strides"], form["dilations"], pads, pads[rank:], strict=False)
    counts = [(n + low + high - (k - 1) * d - 1) // s + 1 for n, k, s, d, low, high in rows]
    x = floats(2, 3 * int(np.prod(block)), int(np.prod(counts)))
    sizes = [np.array(row, np.int64) for row in (image, block)]
    agree(lambda op, x: op.Col2Im(x, *sizes, **form), {"x": x}, tolerance=1e-6)


@pytest.mark.parametrize(
    ("operator", "weight", "options"),
    [
        ("Conv", (2, 2, 1, 1, 1, 1), {}),
        ("MaxPool", None, {"kernel_shape": [1] * 4}),
        ("AveragePool", None, {"kernel_shape": [1] * 4}),
    ],
)
def test_what_pytorch_has_no_kernel_for_is_refused(operator, weight, options):
    rank = 4 if weight is None else len(weight) - 2
    shapes = {"x": (1, 2, *[3] * rank), **({} if weight is None else {"w": weight})}
    subject = program(lambda op, *given, **named: op.node(
        operator, (*given, *named.values()), **options), shapes)  # fmt: skip
    with pytest.raises(ExecutionError, match=f"serves '{operator}'"):
        AtenExecutor().compile(AtenExecutor().lower(subject))

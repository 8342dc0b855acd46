"""Gathering and scattering by indices of every kind: from either end, repeated, computed, few."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from ortrain.errors import ExecutionError
from ortrain.runtime.aten import AtenExecutor
from tests.programs import program
from tests.runtime.agreement import agree

DTYPES = (np.float32, np.float64, np.float16, np.int64, np.int32, np.bool_, np.uint8)


def ints(*values):
    return np.array(values, np.int64)


def floats(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def indices_of(rng, size, shape, dtype=np.int64):
    """From either end."""
    return rng.integers(-size, size, shape).astype(dtype)


@pytest.mark.parametrize("seed", range(40))
def test_places_of_an_axis(seed):
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    shape = [draw.choice([1, 2, 3, 20]) for _ in range(draw.randint(1, 4))]
    axis = draw.randint(-len(shape), len(shape) - 1)
    count = [draw.randint(1, 3) for _ in range(draw.randint(0, 3))]
    indices = indices_of(rng, shape[axis], count, draw.choice([np.int64, np.int32]))
    x = rng.standard_normal(shape).astype(draw.choice(DTYPES))
    agree(lambda op, x, i: op.Gather(x, i, axis=axis), {"x": x, "i": indices})
    agree(lambda op, x: op.Gather(x, indices, axis=axis), {"x": x})


def test_places_one_after_another_are_a_view():
    x = floats(2, 5, 3)
    for places in (ints(1), ints(-1), ints(1, 2, 3), ints(-2, -1), ints(4)[0], ints(-5)[0]):
        for source in agree(lambda op, x, p=places: op.Gather(x, p, axis=1), {"x": x}):
            assert ".narrow(1, " in source or ".select(1, " in source
    for places in (ints(-1, 0), ints(2, 1), ints(0, 0)):
        for source in agree(lambda op, x, p=places: op.Gather(x, p, axis=1), {"x": x}):
            assert "narrow" not in source


def test_no_places():
    agree(lambda op, x: op.Gather(x, np.zeros(0, np.int64), axis=1), {"x": floats(2, 5, 3)})
    agree(lambda op, x, i: op.Gather(x, i), {"x": floats(5, 32), "i": np.zeros((0, 2), np.int64)})


def test_a_place_that_sizes_tell():
    agree(lambda op, x, like: op.Gather(x, op.Sub(op.Shape(like), 3), axis=1),
          {"x": floats(2, 5), "like": floats(7, 2)})  # fmt: skip
    agree(lambda op, x, like: op.Gather(x, op.Size(like)),
          {"x": floats(5, 2), "like": floats(2, 2)})  # fmt: skip


@pytest.mark.parametrize("wide", [1, 64])
def test_an_index_out_of_range_is_an_error(wide):
    """And never an element of another row, also where negative ones are moved."""
    subject = program(
        lambda op, x, i: {"a": op.Gather(x, i), "b": op.GatherElements(x, op.Unsqueeze(i, [1]))},
        {"x": (4, wide), "i": ("n",)}, dtypes={"i": np.int64},
    )  # fmt: skip
    executor = AtenExecutor()
    compiled = executor.compile(executor.lower(subject))
    for index in (4, -5, 2**40, -(2**40)):
        with pytest.raises(ExecutionError, match=r"out of (range|bounds)"):
            compiled.run([floats(4, wide), ints(index)])


@pytest.mark.parametrize("seed", range(30))
def test_elements_and_rows(seed):
    """GatherElements, GatherND and their opposites, at each reduction."""
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    shape = [draw.randint(1, 4) for _ in range(draw.randint(1, 4))]
    axis = draw.randint(-len(shape), len(shape) - 1)
    x = rng.standard_normal(shape).astype(draw.choice([np.float32, np.float64, np.int64]))
    fewer = [draw.randint(1, n) for n in shape]
    indices = indices_of(rng, shape[axis], fewer)
    agree(lambda op, x, i: op.GatherElements(x, i, axis=axis), {"x": x, "i": indices})
    agree(lambda op, x: op.GatherElements(x, indices, axis=axis), {"x": x})
    for reduction in ("add", "mul", "max", "min"):
        updates = rng.standard_normal(fewer).astype(x.dtype)
        agree(
            lambda op, x, i, u, r=reduction: op.ScatterElements(x, i, u, axis=axis, reduction=r),
            {"x": x, "i": indices, "u": updates}, tolerance=1e-6,
        )  # fmt: skip

    width = draw.randint(1, len(shape))
    lead = [draw.randint(1, 3) for _ in range(draw.randint(0, 2))]
    columns = [indices_of(rng, n, lead) for n in shape[:width]]
    places = np.stack(columns, -1) if lead else np.array(columns)
    agree(lambda op, x, i: op.GatherND(x, i), {"x": x, "i": places})
    agree(lambda op, x: op.GatherND(x, places), {"x": x})
    for reduction in ("add", "mul", "max", "min"):
        updates = rng.standard_normal([*lead, *shape[width:]]).astype(x.dtype)
        agree(
            lambda op, x, i, u, r=reduction: op.ScatterND(x, i, u, reduction=r),
            {"x": x, "i": places, "u": updates}, tolerance=1e-6,
        )  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_writing_at_places_that_differ(seed):
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    shape = [draw.randint(2, 4) for _ in range(3)]
    rows = rng.permutation(shape[0])[:2]
    rows = np.where(rng.random(2) < 0.5, rows, rows - shape[0])[:, None]
    x = rng.standard_normal(shape).astype(draw.choice([np.float32, np.int64]))
    updates = rng.standard_normal((2, *shape[1:])).astype(x.dtype)
    agree(lambda op, x, i, u: op.ScatterND(x, i, u), {"x": x, "i": rows, "u": updates})
    agree(lambda op, x, u: op.ScatterND(x, rows, u), {"x": x, "u": updates})
    wide = np.broadcast_to(rows[:, :, None], updates.shape).astype(np.int32)
    agree(lambda op, x, i, u: op.ScatterElements(x, i, u), {"x": x, "i": wide, "u": updates})


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_rows_of_each_batch(batch):
    rng = np.random.default_rng(0)
    shape = (2, 3, 4, 5)
    for width in range(1, 5 - batch):
        lead = [*shape[:batch], 2]
        columns = [indices_of(rng, n, lead) for n in shape[batch : batch + width]]
        places = np.stack(columns, -1)
        if batch:  # onnx.reference takes no negative ones there
            places = places % np.array(shape[batch : batch + width])
        agree(lambda op, x, i: op.GatherND(x, i, batch_dims=batch),
              {"x": floats(*shape), "i": places})  # fmt: skip


def test_what_a_condition_picks():
    x, chosen = floats(4, 3), np.array([True, False, True])
    agree(lambda op, x, c: op.Compress(x, c, axis=-2), {"x": x, "c": chosen})
    agree(lambda op, x, c: op.Compress(x, c), {"x": x, "c": chosen})
    agree(lambda op, x, c: op.Compress(x, c, axis=0), {"x": x, "c": np.zeros(4, bool)})
    agree(lambda op, x: op.NonZero(op.Greater(x, 0.0)), {"x": x})
    agree(lambda op, x: op.NonZero(x), {"x": np.array([0.0, np.nan, -0.0, 2], np.float32)})
    agree(lambda op, x: op.GatherND(x, op.Transpose(op.NonZero(op.Greater(x, 0.0)), perm=[1, 0])),
          {"x": x})  # fmt: skip


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("axis", [0, -1])
def test_of_equals_the_first_comes_first(axis, largest):
    x = np.array([[1, 3, 3, 1, 2], [2, 2, 2, 2, 2], [5, 1, 5, 1, 5]], np.float32)
    for count in (1, 3):
        agree(lambda op, x, k: dict(zip(("values", "places"), op.TopK(
                  x, k, outputs=2, axis=axis, largest=largest), strict=True)),
              {"x": x, "k": ints(count)})  # fmt: skip
        agree(lambda op, x, n=count: op.TopK(
                  x, [n], outputs=2, axis=axis, largest=largest)[0], {"x": x})  # fmt: skip


@pytest.mark.parametrize("order", [0, 1])
def test_what_is_there_once(order):
    names = ("values", "first", "inverse", "counts")

    def body(op, x):
        return dict(zip(names, op.Unique(x, outputs=4, sorted=order), strict=True))

    x = np.array([2.0, 1, 1, 3, 4, 3], np.float32)
    agree(body, {"x": x})
    x = x.reshape(2, 3)
    agree(lambda op, x: op.Unique(x, sorted=1), {"x": x.astype(np.int64)})
    agree(
        lambda op, x: dict(zip(names, op.Unique(x, outputs=4, axis=0, sorted=1), strict=True)),
        {"x": np.array([[1, 0], [0, 0], [1, 0]], np.int64)},
    )  # fmt: skip


def test_rows_are_added_in_their_order_on_any_number_of_threads():
    """Sums of floats depend on the order; PyTorch's ``index_put`` adds in any."""
    rng = np.random.default_rng(0)
    rows = 1 << 16
    feeds = {
        "x": np.zeros((8, 3), np.float32),
        "i": rng.integers(0, 8, (rows, 1)),
        "u": (rng.standard_normal((rows, 3)) * 10.0 ** rng.integers(-6, 6, (rows, 1))).astype("f"),
    }
    subject = program(
        lambda op, x, i, u: op.ScatterND(x, i, u, reduction="add"),
        {k: v.shape for k, v in feeds.items()}, dtypes={"i": np.int64},
    )  # fmt: skip
    executor = AtenExecutor()
    compiled = executor.compile(executor.lower(subject))
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        results = [compiled.run(list(feeds.values()))[0] for _ in range(4)]
    finally:
        torch.set_num_threads(threads)
    assert all((result == results[0]).all() for result in results)


def test_an_embedding_refuses_a_negative_index():
    subject = program(
        lambda op, w, i: op.node("Embedding", (w, i), domain="ortrain"),
        {"w": (4, 3), "i": (2,)}, dtypes={"i": np.int64},
    )  # fmt: skip
    executor = AtenExecutor()
    compiled = executor.compile(executor.lower(subject))
    np.testing.assert_array_equal(compiled.run([floats(4, 3), ints(3, 0)])[0], floats(4, 3)[[3, 0]])
    with pytest.raises(ExecutionError, match="out of range"):
        compiled.run([floats(4, 3), ints(0, -1)])


def test_unsigned_numbers_that_pytorch_cannot_order_are_refused():
    subject = program(lambda op, x: op.Unique(x), {"x": (3,)}, dtype=np.uint32)
    with pytest.raises(ExecutionError, match="cannot order uint32"):
        AtenExecutor().compile(AtenExecutor().lower(subject))


def test_the_larger_of_unsigned_numbers_is_not_guessed():
    subject = program(
        lambda op, x, i, u: op.ScatterND(x, i, u, reduction="max"),
        {"x": (3,), "i": (2, 1), "u": (2,)}, dtypes={"x": np.uint16, "u": np.uint16, "i": np.int64},
    )  # fmt: skip
    with pytest.raises(ExecutionError, match="cannot order uint16"):
        AtenExecutor().compile(AtenExecutor().lower(subject))

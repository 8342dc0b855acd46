"""What functions of PyTorch draw: the bits of the bodies on the reference, in any shape."""

from __future__ import annotations

import random

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch

from ortrain.ops.dropout import threshold
from ortrain.ops.random import KINDS, drawn
from ortrain.runtime.aten import AtenExecutor, hash
from tests.ops.test_random import SEEDS, SHAPES, attributes, draw
from tests.programs import program, run
from tests.runtime.agreement import agree


@pytest.fixture(autouse=True, params=["on the host", "on a device"])
def mixing(request, monkeypatch):
    """Rows and columns as the CPU mixes them, and as a GPU does, here on the CPU as well."""
    if request.param == "on a device":
        monkeypatch.setattr(hash, "on_device", lambda device: True)


FLOATING = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)


def on_pytorch(subject, feeds):
    executor = AtenExecutor()
    compiled = executor.compile(executor.lower(subject))
    return compiled.run([feeds[value.name] for value in subject.graph.inputs])[0]


def generated(seed):
    """A shape, a step's seed and the number of a stream."""
    pick = random.Random(seed)
    shape = [pick.randint(1, 9) for _ in range(pick.randint(0, 4))]
    return shape, pick.randint(-(2**63), 2**63 - 1), pick.randint(0, 200)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
def test_draws(kind, symbolic):
    chosen = [(shape, seed, 3) for shape, seed in zip(SHAPES * 2, SEEDS * 2, strict=False)]
    for shape, seed, stream in [*chosen, *map(generated, range(10))]:
        subject = draw(kind, shape, stream, symbolic, **attributes(kind))
        feeds = {"seed": np.array(seed, np.int64), "like": np.zeros(shape, np.float32)}
        wanted = drawn(kind, shape, seed=seed, stream=stream, **attributes(kind))
        found = on_pytorch(subject, feeds)
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)


def test_many_draws_to_the_last_bit():
    """More than one in 10,000 would show: the vector units of a processor round as they like."""
    for kind in KINDS:
        feeds = {"seed": np.array(7, np.int64)}
        found = on_pytorch(draw(kind, (500, 1000), **attributes(kind)), feeds)
        wanted = drawn(kind, (500, 1000), seed=7, stream=0, **attributes(kind))
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("kind", ["uniform", "normal", "exponential"])
def test_draws_of_a_dtype(kind, dtype):
    kind_of = int(ir.DataType.from_numpy(np.dtype(dtype)))
    subject, feeds = draw(kind, (4, 50), 5, dtype=kind_of), {"seed": np.array(5, np.int64)}
    found, wanted = on_pytorch(subject, feeds), run(subject, feeds)["y"]
    assert found.dtype == wanted.dtype == dtype
    np.testing.assert_array_equal(found.astype(np.float64), wanted.astype(np.float64))


def test_a_chance_of_nothing_or_all():
    for chance in (0.0, 1.0):
        subject = draw("bernoulli", (3, 4), chance=chance)
        found = on_pytorch(subject, {"seed": np.array(1, np.int64)})
        np.testing.assert_array_equal(found, np.full((3, 4), chance == 1))


def dropout(ratio, stream):
    def body(op, x, seed, index=None):
        inputs = (x, seed, index)
        return op.node("Dropout", inputs, domain="ortrain", ratio=ratio, stream=stream)

    return body


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("number", range(12))
def test_dropout(number, dtype):
    shape, seed, stream = generated(number)
    ratio = random.Random(number).choice([0.1, 0.5, 0.9, 0.999, 1e-7])
    x = np.random.default_rng(number).standard_normal(shape).astype(dtype)
    feeds = {"x": x, "seed": np.array(seed, np.int64)}
    agree(dropout(ratio, stream), feeds)
    if shape:
        index = np.random.default_rng(0).permutation(int(np.prod(shape[:-1])))
        agree(dropout(ratio, stream), {**feeds, "index": index.reshape(shape[:-1])})


@pytest.mark.parametrize("dtype", FLOATING)
def test_what_is_kept_is_scaled_as_pytorch_scales_it(dtype):
    """In a narrow dtype the product is rounded, and not its factor."""
    subject = program(
        dropout(0.3, 1), {"x": (64, 100), "seed": ()}, dtype=dtype, dtypes={"seed": np.int64}
    )
    x = np.random.default_rng(0).standard_normal((64, 100)).astype(dtype)
    found = on_pytorch(subject, {"x": x, "seed": np.array(9, np.int64)}).astype(np.float64)
    kept = drawn("bernoulli", (64, 100), seed=9, stream=1, chance=0.7)
    wide = np.float64 if dtype is np.float64 else np.float32
    wanted = (x.astype(wide) * wide(1 / 0.7)).astype(dtype).astype(np.float64)
    np.testing.assert_array_equal(found, np.where(kept, wanted, 0.0))


def test_a_seed_may_be_a_constant():
    def body(op, x):
        return dropout(0.4, 2)(op, x, op.constant(np.array(2**40 + 3, np.int64)))

    agree(body, {"x": np.ones((5, 7), np.float32)})


def test_masks_of_long_rows_and_of_long_columns():
    for shape in ((1, 70_000), (70_000, 1), (300, 301)):
        mask = hash.keep(shape, torch.tensor(-5), 4, threshold(0.9), torch.device("cpu"))
        wanted = drawn("bernoulli", shape, seed=-5, stream=4, chance=0.9)
        np.testing.assert_array_equal(mask.numpy(), wanted)

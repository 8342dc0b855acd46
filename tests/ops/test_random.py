"""Random numbers of a program: the same bits everywhere, and distributed as they should be."""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from ortrain.ops import expand
from ortrain.ops.random import KINDS, drawn
from tests.programs import program, run

SHAPES = [(), (1,), (0,), (257,), (3, 5), (2, 3, 4), (4, 1, 1, 1), (2, 0, 3)]
SEEDS = [0, 1, 2**31, 2**32 - 1, 2**32, 1234567890123, 2**63 - 1, -1, -(2**40)]


def draw(kind, shape, stream=0, symbolic=False, **attributes):
    """A program that draws; with a symbolic shape, that of an input."""

    def body(op, seed, like=None):
        sizes = op.constant(np.array(shape, np.int64)) if like is None else op.Shape(like)
        return op.node(
            f"Random{kind.title()}", (sizes, seed), domain="ortrain", stream=stream, **attributes
        )

    shapes = {"seed": (), **({"like": [f"d{i}" for i in range(len(shape))]} if symbolic else {})}
    return program(body, shapes, dtypes={"seed": np.int64})


def session(subject):
    lowered = subject.clone()
    expand(lowered.graph, opset=lowered.opset)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # of a shape that is folded away
    return onnxruntime.InferenceSession(lowered.serialize(), options)


def on_onnxruntime(subject, feeds):
    return session(subject).run(None, feeds)[0]


def attributes(kind):
    return {"chance": 0.3} if kind == "bernoulli" else {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_executors_and_numpy_draw_the_same_bits(kind, shape, symbolic):
    subject = draw(kind, shape, 3, symbolic, **attributes(kind))
    on_onnxruntime = session(subject)
    for seed in SEEDS[:: 4 if symbolic else 1]:
        feeds = {"seed": np.array(seed, np.int64)}
        if symbolic:
            feeds["like"] = np.zeros(shape, np.float32)
        wanted = drawn(kind, shape, seed=seed, stream=3, **attributes(kind))
        for found in (run(subject, feeds)["y"], on_onnxruntime.run(None, feeds)[0]):
            assert found.dtype == wanted.dtype
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("kind", ["uniform", "normal", "exponential"])
def test_float64_has_the_numbers_of_float32(kind):
    subject = draw(kind, (4, 50), dtype=int(ir.DataType.DOUBLE))
    wanted = drawn(kind, (4, 50), seed=5, stream=0).astype(np.float64)
    for found in (run(subject, feeds(5))["y"], on_onnxruntime(subject, feeds(5))):
        assert found.dtype == np.float64
        np.testing.assert_array_equal(found, wanted)


def feeds(seed):
    return {"seed": np.array(seed, np.int64)}


@pytest.mark.parametrize(
    ("dtype", "numpy", "digits"),
    [("FLOAT16", np.float16, 11), ("BFLOAT16", ml_dtypes.bfloat16, 8)],
)
def test_uniform_numbers_of_half_precision_stay_below_one(dtype, numpy, digits):
    subject = draw("uniform", (200, 200), dtype=int(ir.DataType[dtype]))
    found = run(subject, feeds(5))["y"].astype(np.float32)
    wanted = drawn("uniform", (200, 200), seed=5, stream=0, digits=digits)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(wanted.astype(numpy).astype(np.float32), wanted)
    assert found.max() == 1 - 2.0**-digits
    assert found.min() == 0


def test_a_bernoulli_draw_is_the_mask_of_a_dropout():
    """So eager, whose dropouts draw Bernoulli numbers, can be given the mask of the graph."""
    for shape, ratio in itertools.product([(), (9,), (4, 6), (2, 3, 5)], [0.1, 0.25, 1 / 3, 0.9]):
        subject = program(
            lambda op, x, seed, ratio=ratio: op.node(
                "Dropout", (x, seed), domain="ortrain", ratio=ratio, stream=2
            ),
            {"x": shape, "seed": ()}, dtypes={"seed": np.int64},
        )  # fmt: skip
        y = run(subject, {"x": np.ones(shape, np.float32), **feeds(8)})["y"]
        # PyTorch computes the chance in float64, an ONNX file has the ratio in float32.
        for chance in (1 - ratio, 1 - float(np.float32(ratio))):
            mask = drawn("bernoulli", shape, seed=8, stream=2, chance=chance)
            np.testing.assert_array_equal(y > 0, mask)


def test_chances_of_none_and_all_are_exact():
    for chance in (0.0, 1.0):
        subject = draw("bernoulli", (30, 40), chance=chance)
        np.testing.assert_array_equal(on_onnxruntime(subject, feeds(1)), np.full((30, 40), chance))
        found = drawn("bernoulli", (30, 40), seed=1, stream=0, chance=chance)
        np.testing.assert_array_equal(found, np.full((30, 40), chance))


def test_an_unknown_kind_is_an_error():
    with pytest.raises(ValueError, match="expected one of bits, uniform"):
        drawn("poisson", (3,), seed=0, stream=0)


def test_the_numbers_of_a_vector_differ():
    """A permutation is the order of them."""
    numbers = drawn("bits", (200_000,), seed=3, stream=1)
    assert len(np.unique(numbers)) == len(numbers)


# -- distribution: the bounds are five standard deviations unless said, and can fail -------------

SHAPE = (400, 500)
COUNT = math.prod(SHAPE)


def probabilities(kind, numbers):
    """Where each number lies in its distribution, from 0 to 1."""
    if kind == "uniform":
        return numbers.astype(np.float64)
    if kind == "exponential":
        return -np.expm1(-numbers.astype(np.float64))
    return np.array([0.5 * math.erfc(-z / math.sqrt(2)) for z in numbers.ravel().tolist()])


MOMENTS = {"uniform": (0.5, 1 / 12, 1 / 180), "normal": (0, 1, 2), "exponential": (1, 1, 8)}


@pytest.mark.parametrize("kind", MOMENTS)
def test_mean_and_variance_are_right(kind):
    mean, variance, of_squares = MOMENTS[kind]
    for seed, stream in ((1, 0), (1, 1), (2, 0)):
        numbers = drawn(kind, SHAPE, seed=seed, stream=stream).astype(np.float64)
        assert abs(numbers.mean() - mean) < 5 * math.sqrt(variance / COUNT)
        squares = np.square(numbers - mean)
        assert abs(squares.mean() - variance) < 5 * math.sqrt(of_squares / COUNT)


@pytest.mark.parametrize("kind", MOMENTS)
@pytest.mark.parametrize("shape", [(COUNT,), SHAPE, (COUNT, 1), (20, 100, 100)], ids=str)
def test_the_distribution_function_is_right(kind, shape):
    """The Kolmogorov-Smirnov distance; beyond 1.95 / sqrt(n) lies one in a thousand."""
    assert distance(probabilities(kind, drawn(kind, shape, seed=7, stream=2))) < 1.95


def distance(p):
    p = np.sort(p.ravel())
    steps = np.arange(len(p) + 1) / len(p)
    return max((steps[1:] - p).max(), (p - steps[:-1]).max()) * math.sqrt(len(p))


def test_the_distance_rejects_a_wrong_distribution():
    uniform = drawn("uniform", SHAPE, seed=7, stream=2)
    assert distance(np.square(uniform)) > 1.95
    assert distance(uniform * 0.99) > 1.95


def test_the_inverses_are_those_of_the_distributions():
    """Against the exact inverse at the bits themselves: relative errors below 2e-6 everywhere."""
    k = drawn("bits", (300, 300), seed=9, stream=4).astype(np.float64)
    p = (k + 0.5) / 2**32
    found = drawn("exponential", (300, 300), seed=9, stream=4)
    upper = -np.log1p(-(2**32 - 1 - k + 0.5) / 2**32)
    np.testing.assert_allclose(found, np.where(p < 0.5, -np.log(p), upper), rtol=2e-6)
    normal = drawn("normal", (300, 300), seed=9, stream=4)
    tail = (2**31 - 1 - k % 2**31 + 0.5) / 2**32
    known = np.array([0.5 * math.erfc(abs(z) / math.sqrt(2)) for z in normal.ravel().tolist()])
    # An error of 2e-6 in z is one of 2e-6 * z * density in p.
    density = np.exp(-np.square(normal.astype(np.float64)) / 2) / math.sqrt(2 * math.pi)
    allowed = 2e-6 * np.abs(normal) * density
    assert (np.abs(known.reshape(300, 300) - tail) <= allowed + 1e-15).all()
    np.testing.assert_array_equal(normal > 0, k < 2**31)


def standard(kind, **place):
    numbers = drawn(kind, SHAPE, **place).astype(np.float64)
    mean, variance, _ = MOMENTS[kind]
    return (numbers - mean) / math.sqrt(variance)


@pytest.mark.parametrize("kind", MOMENTS)
def test_streams_and_steps_are_independent(kind):
    first = standard(kind, seed=1000, stream=0)
    others = [(1000, stream) for stream in (1, 2, 3, 64)]
    others += [(seed, 0) for seed in (1001, 1002, 2000, 1000 + 2**32, 1000 + 2**33)]
    for seed, stream in others:
        other = standard(kind, seed=seed, stream=stream)
        for a, b in ((first, other), (first[1:], other[:-1]), (first[:, 1:], other[:, :-1])):
            assert abs((a * b).sum()) / math.sqrt(a.size) < 5
        # Nor may numbers return at another place: compare every row with every row.
        products = first @ other.T / math.sqrt(SHAPE[1])
        assert abs(products.var() - 1) < 0.05
        assert abs(products).max() < 8


@pytest.mark.parametrize("kind", MOMENTS)
def test_neighbours_rows_columns_and_rectangles_are_independent(kind):
    for seed in range(3):
        z = standard(kind, seed=seed, stream=5)
        for down, right in [(0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (3, 5), (0, 64), (64, 0)]:
            products = z[: len(z) - down, : SHAPE[1] - right] * z[down:, right:]
            assert abs(products.sum()) / math.sqrt(products.size) < 5
        for side in (z, z.T):
            products = (side @ side.T / math.sqrt(side.shape[1]))[np.triu_indices(len(side), 1)]
            assert abs(products.var() - 1) < 0.05
            assert abs(products).max() < 8
        for down, right in itertools.product((1, 2, 8, 64), (1, 3, 16, 128)):
            a, b, c, d = (
                z[:-down, :-right], z[:-down, right:], z[down:, :-right], z[down:, right:]
            )  # fmt: skip
            rectangles = a * b * c * d
            assert abs(rectangles.sum()) / math.sqrt(np.square(rectangles).sum()) < 5.5


def test_every_bit_of_a_number_is_a_coin():
    k = drawn("bits", SHAPE, seed=4, stream=0)
    bits = np.stack([(k >> i) & 1 for i in range(32)]).reshape(32, -1) * 2.0 - 1
    products = bits @ bits.T / math.sqrt(COUNT)
    np.fill_diagonal(products, 0)
    assert abs(products).max() < 5
    assert abs(bits.sum(1)).max() / math.sqrt(COUNT) < 5

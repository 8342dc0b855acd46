"""Arithmetic, choice, reductions and what runs along an axis, in forms that the tables have not."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from tests.runtime.agreement import agree

FLOATING = (np.float16, np.float32, np.float64)
INTEGERS = (np.int32, np.int64)
ODD = (0.0, -0.0, 1.5, -2.5, np.inf, -np.inf, np.nan)


def numbers(dtype, *shape, seed=0, low=-9):
    rng = np.random.default_rng(seed)
    if np.issubdtype(dtype, np.integer):
        return rng.integers(low, 9, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", [*FLOATING, *INTEGERS])
@pytest.mark.parametrize(
    "operator", ["Add", "Sub", "Mul", "Div", "Max", "Min", "Less", "GreaterOrEqual", "Equal"]
)
def test_a_constant_on_either_side(operator, dtype):
    x = np.maximum(numbers(dtype, 3, 4), 1)
    for shape in ((), (1,), (4,), (3, 1)):
        c = np.maximum(numbers(dtype, *shape, seed=1), 1)
        rounding = 1e-3 if dtype is np.float16 else 1e-6
        tolerance = rounding if operator == "Div" else 0.0
        agree(
            lambda op, x, c=c: {
                "left": op.node(operator, (op.constant(c), x)),
                "right": op.node(operator, (x, op.constant(c))),
            },
            {"x": x},
            tolerance=tolerance,
        )


@pytest.mark.parametrize("operator", ["Add", "Sub", "Mul", "Div", "Max", "Min", "Less", "Equal"])
def test_sizes_among_numbers(operator):
    """They are Python numbers in the function, and tensors to whoever reads them as such."""
    x = np.arange(1, 13).reshape(3, 4)
    agree(
        lambda op, x: {
            "left": op.node(operator, (op.Size(x), x)),
            "right": op.node(operator, (x, op.Size(x))),
            "row": op.node(operator, (x, op.Gather(op.Shape(x), [1, 1, 0, 1]))),
        },
        {"x": x},
    )


def test_what_is_no_number_or_infinite():
    x, y = np.array(ODD, np.float32)[:, None], np.array(ODD, np.float32)
    agree(
        lambda op, x, y: {
            "max": op.Max(x, y),
            "min": op.Min(x, y),
            "max_1": op.Max(x, 1.0),
            "min_1": op.Min(op.constant(np.float32(1.0)), x),
            "max_nan": op.Max(x, op.constant(np.float32(np.nan))),
            "clip": op.Clip(x, op.constant(np.float32(-1)), op.constant(np.float32(2))),
            "fed": op.Clip(x, op.Gather(y, np.int64(3))),
            "less": op.Less(x, y),
            "equal": op.Equal(x, y),
            "relu": op.Relu(x),
            "nan": op.IsNaN(x),
        },
        {"x": x, "y": y},
    )


@pytest.mark.parametrize("dtype", FLOATING)
def test_which_infinities(dtype):
    x = np.array(ODD, dtype)
    for negative, positive in itertools.product((0, 1), repeat=2):
        flags = {"detect_negative": negative, "detect_positive": positive}
        agree(lambda op, x, f=flags: op.IsInf(x, **f), {"x": x})


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, *INTEGERS])
def test_remainders_of_whole_numbers(dtype):
    low = 0 if dtype is np.uint8 else -9
    a = numbers(dtype, 40, 1, low=low)
    b = np.array([n for n in range(low, 9) if n], dtype)
    for fmod in (0, 1):
        agree(lambda op, a, b, f=fmod: op.Mod(a, b, fmod=f), {"a": a, "b": b})


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, *INTEGERS, *FLOATING])
def test_choice(dtype):
    condition = np.random.default_rng(0).random((3, 4)) < 0.5
    x, one = (numbers(np.float32, 3, 4) * 9).astype(dtype), np.array(1, dtype)
    agree(
        lambda op, c, x: {
            "right": op.Where(c, x, op.constant(one)),
            "left": op.Where(c, op.constant(one), x),
            "both": op.Where(c, op.constant(one), op.constant(np.zeros_like(one))),
            "row": op.Where(c, op.constant(np.array([one] * 4)), x),
        },
        {"c": condition, "x": x},
    )


def test_round_goes_to_the_even_number():
    x = np.arange(-5, 6, dtype=np.float32) / 2
    agree(lambda op, x: op.Round(x), {"x": x})


REDUCTIONS = ["Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum", "LogSumExp"]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", REDUCTIONS)
def test_reductions(kind, seed):
    pick = random.Random(f"{kind} {seed}")
    shape = [pick.randint(1, 4) for _ in range(pick.randint(1, 4))]
    rank = len(shape)
    dtype = pick.choice([np.float32, np.float64, np.int64])
    if dtype is np.int64 and kind.startswith("Log"):
        dtype = np.float64
    x = np.abs(numbers(dtype, *shape, seed=seed)) + dtype(1)
    over = np.array(pick.sample(range(-rank, 0), pick.randint(0, rank)), np.int64)
    options = {"keepdims": pick.randint(0, 1), "noop_with_empty_axes": pick.randint(0, 1)}

    def known(op, x):
        return op.node(f"Reduce{kind}", (x, op.constant(over)), **options)

    def fed(op, x, axes):
        result = op.node(f"Reduce{kind}", (x, axes), **options)
        result.shape = None
        return result

    agree(known, {"x": x}, tolerance=1e-5)
    agree(fed, {"x": x, "axes": over}, tolerance=1e-5)


@pytest.mark.parametrize("operator", ["CumSum", "CumProd"])
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.int64])
def test_what_has_come_so_far(operator, dtype):
    x = numbers(dtype, 3, 4, 2)
    for axis, exclusive, reverse in itertools.product((0, -2, 2), (0, 1), (0, 1)):
        flags = {"exclusive": exclusive, "reverse": reverse}
        place = np.array(axis, np.int64)
        agree(
            lambda op, x, f=flags, p=place: op.node(operator, (x, op.constant(p)), **f),
            {"x": x},
            opset=26,
            tolerance=1e-6,
        )
        agree(
            lambda op, x, axis, f=flags: op.node(operator, (x, axis), **f),
            {"x": x, "axis": place},
            opset=26,
            tolerance=1e-6,
        )


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, np.uint8])
def test_the_first_and_the_last_of_equals(dtype):
    x = np.random.default_rng(0).integers(0, 3, (5, 7, 3)).astype(dtype)
    for operator, axis, last, keep in itertools.product(
        ("ArgMax", "ArgMin"), (0, -2), (0, 1), (0, 1)
    ):
        options = {"axis": axis, "select_last_index": last, "keepdims": keep}
        agree(lambda op, x, o=operator, k=options: op.node(o, (x,), **k), {"x": x})
    for largest in (0, 1):
        agree(lambda op, x, k=largest: op.TopK(x, [4], axis=1, largest=k, outputs=2)[1], {"x": x})
    if dtype in FLOATING:
        agree(lambda op, x: op.Hardmax(x, axis=1), {"x": x})

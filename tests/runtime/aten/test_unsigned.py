"""Unsigned numbers, which a running function holds by their bits, and conversions of every kind."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from ortrain.runtime.aten import AtenExecutor
from tests.programs import program
from tests.runtime.agreement import agree

UNSIGNED = (np.uint8, np.uint16, np.uint32, np.uint64)
SIGNED = (np.int8, np.int16, np.int32, np.int64)
FLOATING = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)


def numbers(dtype, *shape, seed=0, low=0):
    """Of every size, both ends and the middle among them."""
    rng = np.random.default_rng([seed, np.dtype(dtype).itemsize])
    info = np.iinfo(dtype)
    shifts = rng.integers(0, info.bits, shape).astype(dtype)
    drawn = rng.integers(info.min, info.max, shape, dtype, endpoint=True) >> shifts
    ends = [low, low + 1, info.max, info.max - 1, info.max // 2, info.max // 2 + 1]
    drawn.reshape(-1)[: len(ends)] = np.array(ends, dtype)[: drawn.size]
    return np.maximum(rng.permutation(drawn.reshape(-1)).reshape(shape), dtype(low))


PAIRS = [
    "Add", "Sub", "Mul", "Max", "Min", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Equal", "Greater",
    "GreaterOrEqual", "Less", "LessOrEqual",
]  # fmt: skip


@pytest.mark.parametrize("dtype", UNSIGNED)
@pytest.mark.parametrize("operator", [*PAIRS, "Div", "Mod"])
def test_two_numbers(operator, dtype):
    a, b = numbers(dtype, 60, 1), numbers(dtype, 1, 60, seed=1, low=operator in ("Div", "Mod"))
    agree(lambda op, a, b: op.node(operator, (a, b)), {"a": a, "b": b})
    for number in b[0, :9]:
        known = np.array(number)
        agree(lambda op, a, c=known: op.node(operator, (a, op.constant(c))), {"a": a})
        if operator not in ("Div", "Mod") or a.all():
            agree(lambda op, b, c=known: op.node(operator, (op.constant(c), b)), {"b": b})


@pytest.mark.parametrize("dtype", UNSIGNED)
@pytest.mark.parametrize("direction", ["LEFT", "RIGHT"])
def test_shifts(direction, dtype):
    x, bits = numbers(dtype, 40, 1), np.iinfo(dtype).bits
    counts = np.arange(bits, dtype=dtype)
    agree(lambda op, x, n: op.BitShift(x, n, direction=direction), {"x": x, "n": counts})
    for count in (0, 1, bits // 2, bits - 1):
        known = np.array(count, dtype)
        agree(lambda op, x, n=known: op.BitShift(x, op.constant(n), direction=direction), {"x": x})


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_one_number(dtype):
    x = numbers(dtype, 5, 8)
    low, high = np.sort(numbers(dtype, 2, seed=3))
    for body in (
        lambda op, x: op.Abs(x),
        lambda op, x: op.Sign(x),
        lambda op, x: op.BitwiseNot(x),
        lambda op, x: op.Clip(x, op.constant(low), op.constant(high)),
        lambda op, x: op.Clip(x, op.constant(high)),
        lambda op, x: op.Where(op.Equal(x, x), x, op.constant(low)),
        lambda op, x: op.ArgMax(x, axis=1),
        lambda op, x: op.ArgMin(x, axis=0, select_last_index=1),
        lambda op, x: op.TopK(x, [3], axis=1, outputs=2)[1],
        lambda op, x: op.TopK(x, [3], axis=0, largest=0, outputs=2)[0],
        lambda op, x: op.ReduceMax(x, [1], keepdims=0),
        lambda op, x: op.ReduceMin(x, keepdims=1),
    ):
        agree(body, {"x": x})
    agree(lambda op, x, a, b: op.Clip(x, a, b), {"x": x, "a": low, "b": high})


def computed(body, x):
    executor, subject = AtenExecutor(), program(body, {"x": x.shape}, dtype=x.dtype)
    return executor.compile(executor.lower(subject)).run([x])[0]


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64, np.int32, np.int64])
def test_sums_and_products_wrap_around_in_their_dtype(dtype):
    x = numbers(dtype, 4, 6)
    with np.errstate(over="ignore"):
        so_far = np.cumsum(x[::-1], 0, dtype)[::-1]
        for body, wanted in (
            (lambda op, x: op.ReduceSum(x, [1], keepdims=0), x.sum(1, dtype)),
            (lambda op, x: op.ReduceProd(x, [0, 1]), x.prod(dtype=dtype, keepdims=True)),
            (lambda op, x: op.ReduceSumSquare(x, [0]), (x * x).sum(0, dtype, keepdims=True)),
            (lambda op, x: op.CumSum(x, np.int64(1)), np.cumsum(x, 1, dtype)),
            (lambda op, x: op.CumSum(x, np.int64(0), exclusive=1, reverse=1), so_far - x),
        ):
            found = computed(body, x)
            assert found.dtype == dtype
            np.testing.assert_array_equal(found, wanted)


def converted(array, to):
    return computed(lambda op, x: op.cast(x, ir.DataType.from_numpy(np.dtype(to))), array)


INTEGERS = (*SIGNED, *UNSIGNED)


@pytest.mark.parametrize("to", [*INTEGERS, *FLOATING, np.bool_])
@pytest.mark.parametrize("source", INTEGERS)
def test_casts_of_integers(source, to):
    x = numbers(source, 300)
    with np.errstate(over="ignore"):
        wanted = x.astype(to)
    found = converted(x, to)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("to", [*INTEGERS, *FLOATING, np.bool_])
@pytest.mark.parametrize("source", [*FLOATING, np.bool_])
def test_casts_of_fractions(source, to):
    rng = np.random.default_rng(0)
    largest = 15 if np.float16 in (source, to) else 70
    x = (rng.uniform(-1, 1, 300) * 2.0 ** rng.integers(-2, largest, 300)).astype(source)
    x[:6] = np.array([0.0, -0.0, 0.5, 1.5, 2.5, -0.5]).astype(source)
    if to in INTEGERS:  # what is beyond their range no standard says
        info, wide = np.iinfo(to), x.astype(np.float64)
        x = x[(np.trunc(wide) >= info.min) & (wide < float(info.max))]
    wanted = x.astype(to)
    found = converted(x, to)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found.astype(np.float64), wanted.astype(np.float64))


def test_a_size_becomes_any_number():
    for to in (*INTEGERS, np.float16, np.float32, np.float64):
        kind = ir.DataType.from_numpy(np.dtype(to))
        agree(lambda op, x, k=kind: op.cast(op.Size(x), k), {"x": np.zeros((3, 4), np.float32)})


def test_bases_decide_about_powers():
    kinds = (np.float32, np.float64, np.float16, np.int32, np.int64)
    for base, exponent in itertools.product(kinds, (*kinds, np.uint32, np.uint64)):
        a, b = np.array([[1], [2], [3], [9]], base), np.array([0, 1, 2, 4], exponent)
        agree(lambda op, a, b: op.Pow(a, b), {"a": a, "b": b}, tolerance=1e-3)
        agree(lambda op, a, c=b[2]: op.Pow(a, op.constant(np.array(c))), {"a": a}, tolerance=1e-3)

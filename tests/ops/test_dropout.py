"""Dropout's mask: the same bits everywhere, and as good as independent draws."""

from __future__ import annotations

import itertools

import numpy as np
import onnxruntime
import pytest

from ortrain.autodiff import differentiate
from ortrain.ops import expand
from ortrain.ops.hash import advanced
from tests.programs import program, run

WEYL = 0x9E3779B1


def mask(rows, columns, seed, stream=0, ratio=0.5, index=None):
    """The mask in int32 arithmetic with wrap-around, as a runtime without uint32 computes it."""
    with np.errstate(over="ignore"):
        first = mix(wrapped(seed))
        second = mix(wrapped(seed >> 32) + first)
        row_key = first + wrapped(stream * 0x85EBCA6B + 0x32D192ED)
        column_key = second + wrapped(stream * 0xC2B2AE35 + 0xD1B54A32)
        places = np.arange(rows) if index is None else np.asarray(index)
        row = mix(wrapped(places) * wrapped(WEYL) + row_key) | np.int32(1)
        column = mix(wrapped(np.arange(columns)) * wrapped(WEYL) + column_key) | np.int32(1)
        product = row[:, None] * column[None, :]
    threshold = min(round((1 - ratio) * 2**24) << 8, 2**32 - 1)
    sign = np.int32(-(2**31))  # an unsigned comparison is a signed one of flipped sign bits
    return (product ^ sign) < (wrapped(threshold) ^ sign)


def wrapped(number):
    if isinstance(number, int):
        return np.array([number & 0xFFFFFFFF], np.uint32).view(np.int32)
    return np.asarray(number).astype(np.uint32).view(np.int32)


def mix(h):
    h = (h ^ shifted(h, 16)) * wrapped(0x7FEB352D)
    h = (h ^ shifted(h, 15)) * wrapped(0x846CA68B)
    return h ^ shifted(h, 16)


def shifted(h, bits):
    """A logical shift to the right: what comes in at the top is masked away."""
    return (h >> np.int32(bits)) & np.int32((1 << (32 - bits)) - 1)


@pytest.mark.parametrize("seed", [0, 1, 12345678901234567, 2**63 - 1, -5, -(2**63)])
@pytest.mark.parametrize("streams", [0, 1, 37, 2**20])
def test_the_streams_of_a_seed_that_is_further_on_are_the_later_ones(seed, streams):
    further = advanced(seed, streams)
    assert -(2**63) <= further < 2**63
    for stream in (0, 1, 5):
        np.testing.assert_array_equal(
            mask(7, 9, further, stream), mask(7, 9, seed, streams + stream)
        )


def dropout(shape, stream=0, ratio=0.5, index=None, symbolic=False):
    def body(op, x, seed, **more):
        inputs = (x, seed, more.get("index"))
        return op.node("Dropout", inputs, domain="ortrain", ratio=ratio, stream=stream)

    dims = [f"d{i}" for i in range(len(shape))] if symbolic else shape
    shapes, dtypes = {"x": dims, "seed": ()}, {"seed": np.int64}
    if index is not None:
        shapes["index"] = dims[:-1] if symbolic else index.shape
        dtypes["index"] = np.int64
    return program(body, shapes, dtypes=dtypes)


def on_onnxruntime(subject, feeds):
    lowered = subject.clone()
    expand(lowered.graph, opset=lowered.opset)
    session = onnxruntime.InferenceSession(lowered.serialize())
    return session.run(None, feeds)[0]


SEEDS = [0, 1, 2**31, 2**32 - 1, 2**32, 1234567890123, 2**63 - 1, -1, -(2**40)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
def test_int32_and_both_executors_draw_the_same_bits(seed, symbolic):
    for shape, stream in itertools.product([(5, 7), (2, 3, 4), (2, 2, 3, 5)], [0, 3]):
        subject = dropout(shape, stream, symbolic=symbolic)
        feeds = {"x": np.ones(shape, np.float32), "seed": np.array(seed, np.int64)}
        wanted = 2.0 * mask(int(np.prod(shape[:-1])), shape[-1], seed, stream).reshape(shape)
        np.testing.assert_array_equal(run(subject, feeds)["y"], wanted)
        np.testing.assert_array_equal(on_onnxruntime(subject, feeds), wanted)


def test_vectors_and_scalars_draw_the_same_bits_on_both_executors():
    for shape in [(257,), ()]:
        subject = dropout(shape)
        for seed in SEEDS:
            feeds = {"x": np.ones(shape, np.float32), "seed": np.array(seed, np.int64)}
            result = on_onnxruntime(subject, feeds)
            np.testing.assert_array_equal(run(subject, feeds)["y"], result)
    kept = on_onnxruntime(dropout((4096,)), {"x": np.ones(4096, np.float32), "seed": np.array(3)})
    assert abs(standard(kept > 0, 0.5).sum()) / 64 < 5


def test_float64_and_float32_draw_the_same_mask():
    x, seed = np.ones((4, 5)), np.array(11)
    body = dropout((4, 5))
    wide = program(
        lambda op, x, seed: op.node("Dropout", (x, seed), domain="ortrain", ratio=0.5, stream=0),
        {"x": (4, 5), "seed": ()}, dtype=np.float64, dtypes={"seed": np.int64},
    )  # fmt: skip
    single = run(body, {"x": x.astype(np.float32), "seed": seed})["y"]
    np.testing.assert_array_equal(run(wide, {"x": x, "seed": seed})["y"], single)


def test_rows_keep_their_mask_when_others_are_dropped():
    kept = np.array([0, 3, 4, 9])
    x = np.random.default_rng(0).standard_normal((10, 6)).astype(np.float32)
    seed = np.array(77, np.int64)
    whole = run(dropout((10, 6), 2), {"x": x, "seed": seed})["y"]
    part = run(dropout((4, 6), 2, index=kept), {"x": x[kept], "seed": seed, "index": kept})["y"]
    np.testing.assert_array_equal(part, whole[kept])


def test_rows_of_a_batch_keep_their_mask_when_others_are_dropped():
    kept = np.array([[0, 2], [5, 7]])
    x = np.ones((2, 4, 6), np.float32)
    seed = np.array(77, np.int64)
    whole = run(dropout((2, 4, 6)), {"x": x, "seed": seed})["y"].reshape(8, 6)
    subject = dropout((2, 2, 6), index=kept)
    part = run(subject, {"x": x[:, :2], "seed": seed, "index": kept})["y"]
    np.testing.assert_array_equal(part, whole[kept])


def test_the_gradient_draws_the_mask_again():
    training = differentiate(dropout((8, 16), 5, 0.3), ["x"])
    ones = np.ones((8, 16), np.float32)
    results = run(training, {"x": ones, "seed": np.array(5), "y.gradient": ones})
    np.testing.assert_array_equal(results["x.gradient"], results["y"])


def test_nothing_random_is_saved_for_the_backward():
    training = differentiate(dropout((8, 16), 5, 0.3), ["x"])
    assert training.operators() == {"ortrain::Dropout": 2}


@pytest.mark.parametrize("ratio", [0.05, 0.1, 0.5, 0.9])
def test_what_is_kept_is_scaled_so_that_the_mean_stays(ratio):
    feeds = {"x": np.ones((64, 64), np.float32), "seed": np.array(4)}
    y = run(dropout((64, 64), 0, ratio), feeds)["y"]
    np.testing.assert_allclose(y[y != 0], 1 / (1 - ratio), rtol=1e-6)
    assert abs(standard(y != 0, ratio).sum()) / 64 < 5


# -- statistics: bounds are five standard deviations unless said, and can fail -----------------

ROWS, COLUMNS, DRAWS = 256, 384, 12
RATIOS = [0.1, 0.5]


def standard(kept, ratio):
    """The mask as numbers of mean 0 and variance 1."""
    return (kept - (1 - ratio)) / np.sqrt(ratio * (1 - ratio))


def standards(ratio, stream=0, seeds=range(100, 100 + DRAWS)):
    return [standard(mask(ROWS, COLUMNS, seed, stream, ratio), ratio) for seed in seeds]


def deviation(products):
    """How many standard deviations the sum of products of independent numbers is from zero."""
    return abs(float(products.sum())) / np.sqrt(products.size)


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.3, 0.5, 0.9])
def test_the_keep_rate_is_right(ratio):
    for z in standards(ratio):
        assert deviation(z) < 5


@pytest.mark.parametrize("ratio", RATIOS)
def test_rows_and_columns_hold_as_many_as_independent_draws_would(ratio):
    for z in standards(ratio):
        for axis, count in ((1, ROWS), (0, COLUMNS)):
            sums = z.sum(axis) / np.sqrt(z.shape[axis])
            chi = (np.square(sums).sum() - count) / np.sqrt(2 * count)
            assert abs(chi) < 5


@pytest.mark.parametrize("ratio", RATIOS)
def test_neighbours_are_independent(ratio):
    for z in standards(ratio):
        for down, right in [(0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (3, 5), (0, 64), (64, 0)]:
            assert deviation(z[: ROWS - down, : COLUMNS - right] * z[down:, right:]) < 5


@pytest.mark.parametrize("ratio", RATIOS)
def test_any_two_rows_and_any_two_columns_are_independent(ratio):
    for z in standards(ratio):
        for side in (z, z.T):
            products = (side @ side.T / np.sqrt(side.shape[1]))[np.triu_indices(len(side), 1)]
            # Many pairs: the variance of their correlations is tight, and the largest of them is
            # that of as many normal numbers (skewed ones at a ratio of 0.1, hence the 8).
            assert abs(products.var() - 1) < 0.05
            assert abs(products).max() < 8


@pytest.mark.parametrize("ratio", RATIOS)
def test_triples_and_rectangles_are_independent(ratio):
    """A mask made of a row's and a column's number could show a pattern in rectangles first."""
    for z in standards(ratio):
        for down, right in itertools.product((1, 2, 8, 64), (1, 3, 16, 128)):
            a, b = z[:-down, :-right], z[:-down, right:]
            c, d = z[down:, :-right], z[down:, right:]
            assert deviation(a * b * c) < 5.5
            assert deviation(a * b * c * d) < 5.5


@pytest.mark.parametrize("ratio", RATIOS)
def test_streams_seeds_and_steps_are_independent(ratio):
    first = standard(mask(ROWS, COLUMNS, 1000, 0, ratio), ratio)
    others = [(1000, stream) for stream in (1, 2, 3, 64)]
    others += [(seed, 0) for seed in (1001, 1002, 2000, 1000 + 2**32, 1000 + 2**33, -1000)]
    for seed, stream in others:
        other = standard(mask(ROWS, COLUMNS, seed, stream, ratio), ratio)
        assert deviation(first * other) < 5
        assert deviation(first[1:] * other[:-1]) < 5
        assert deviation(first[:, 1:] * other[:, :-1]) < 5
        # A mask must not return at another place either: compare every row with every row.
        products = first @ other.T / np.sqrt(COLUMNS)
        assert abs(products.var() - 1) < 0.05
        assert abs(products).max() < 8


def test_one_element_is_kept_in_half_of_many_steps():
    kept = np.stack([mask(4, 8, seed) for seed in range(2000)])
    deviations = standard(kept, 0.5).sum(0) / np.sqrt(2000)
    assert abs(deviations).max() < 5
    assert abs(np.square(deviations).sum() - 32) / np.sqrt(64) < 5


def test_the_statistics_reject_a_weak_mask():
    """The bounds above are no formality: a linear congruence fails them."""
    numbers = np.arange(ROWS * COLUMNS, dtype=np.uint64).reshape(ROWS, COLUMNS)
    weak = standard((numbers * 1664525 + 1013904223) % 2**32 < 2**31, 0.5)
    assert deviation(weak[:, 1:] * weak[:, :-1]) > 5

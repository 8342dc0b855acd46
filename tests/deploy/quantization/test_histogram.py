"""Counts that add up exactly, and the ranges that follow from them."""

from __future__ import annotations

import numpy as np
import pytest

from ortrain.deploy.quantization.histogram import Histogram


def counted(*arrays: np.ndarray) -> Histogram:
    found = Histogram()
    for array in arrays:
        found.add(array)
    return found


def values(seed: int = 0, count: int = 20_000) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(count) * np.exp(rng.standard_normal(count))).astype(np.float32)


def same(one: Histogram, two: Histogram) -> bool:
    return (
        (one.low, one.high, one.count, one.width) == (two.low, two.high, two.count, two.width)
    ) and np.array_equal(one._counts, two._counts)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 100.0, 1e10])
def test_parts_of_any_size_in_any_order_count_as_the_whole(scale: float) -> None:
    array = values() * np.float32(scale)
    parts = [array[:1], array[1:5000] * 1, array[5000:7000], array[7000:]]
    assert same(counted(array), counted(*parts))
    assert same(counted(array), counted(*parts[::-1]))


def test_small_values_and_then_large_ones_count_as_the_other_way_round() -> None:
    small, large = values(1) * np.float32(1e-6), values(2) * np.float32(1e6)
    assert same(counted(small, large), counted(large, small))


def test_histograms_of_shards_merge_to_that_of_all() -> None:
    small, large = values(1), values(2) * np.float32(300)
    for first, second in ((small, large), (large, small)):
        merged = counted(first)
        merged.merge(counted(second))
        assert same(merged, counted(small, large))


@pytest.mark.parametrize("percentile", [90.0, 99.0, 99.9, 99.999])
def test_percentiles_are_those_of_all_values_to_a_bin(percentile: float) -> None:
    array = values()
    found = counted(array)
    low, high = found.percentile(percentile)
    tail = (100 - percentile) / 2
    for value, reached, share in (
        (-low, -array, 100 - tail),
        (high, array, 100 - tail),
        (found.percentile(percentile, symmetric=True)[1], np.abs(array), percentile),
    ):
        # The value up to which there are so many, which is no mean of neighbours far apart.
        exact = np.percentile(reached, share, method="inverted_cdf")
        assert value == pytest.approx(exact, abs=found.width)


def test_a_bin_is_at_most_a_two_thousandth_of_the_largest_value() -> None:
    for scale in (1e-5, 1.0, 3.0, 1000.0):
        found = counted(values() * np.float32(scale))
        assert found.width <= max(-found.low, found.high) / 2048


def test_all_of_a_hundred_is_the_range_itself() -> None:
    found = counted(values())
    assert found.percentile(100.0) == (found.low, found.high)


def test_entropy_clips_what_is_far_out_and_rare() -> None:
    array = np.concatenate([values(count=100_000).clip(-3, 3), np.float32([200.0])])
    low, high = counted(array).entropy(128, 2048)
    assert 2 < high < 60
    assert low == pytest.approx(-3, abs=0.1)


@pytest.mark.parametrize("far", [0.5, -0.5, 5.0])
def test_entropy_does_not_cut_what_is_all_far_from_zero(far: float) -> None:
    values = far + np.random.default_rng(0).standard_normal(4000) * 0.003
    values[:40] += np.linspace(-0.01, 0.01, 40)
    found = Histogram()
    found.add(values.astype(np.float32))
    low, high = found.entropy(128, 128 * 16)
    assert ((values >= low - 1e-3) & (values <= high + 1e-3)).mean() >= 0.99


def test_entropy_keeps_the_range_of_what_is_spread_evenly() -> None:
    array = np.random.default_rng(0).uniform(-1, 1, 200_000).astype(np.float32)
    low, high = counted(array).entropy(128, 2048)
    assert high == pytest.approx(1, abs=0.02)
    assert low == pytest.approx(-1, abs=0.02)


@pytest.mark.parametrize("zeros", [10, 90_000, 10_000_000])
def test_zeros_which_any_range_has_do_not_narrow_it(zeros: int) -> None:
    array = np.abs(values(count=30_000))
    low, high = counted(np.concatenate([array, np.zeros(zeros, np.float32)])).entropy(128, 2048)
    assert (low, high) == (0.0, counted(array).entropy(128, 2048)[1])
    assert high > 20


def test_of_few_values_entropy_is_their_range() -> None:
    array = np.float32([0.0] * 900 + [0.1] * 100 + [1.0] * 20)
    assert counted(array).entropy(128, 2048) == (0.0, 1.0)


def test_entropy_of_shards_is_that_of_all() -> None:
    array = values()
    merged = counted(array[:3000])
    merged.merge(counted(array[3000:]))
    assert merged.entropy(128, 2048) == counted(array).entropy(128, 2048)


def test_values_that_are_none_are_not_counted_and_are_told() -> None:
    found = counted(np.float32([1, 2, np.nan, -np.inf, np.finfo(np.float32).min]))
    assert found.masked
    assert (found.low, found.high, found.count) == (1.0, 2.0, 2)


def test_an_empty_array_and_zeros_are_ranges_too() -> None:
    found = counted(np.zeros((0, 3), np.float32))
    assert found.percentile(99.0) == (0.0, 0.0)
    found.add(np.zeros(5, np.float32))
    assert found.percentile(99.0) == (0.0, 0.0)
    assert found.entropy(128, 2048) == (0.0, 0.0)

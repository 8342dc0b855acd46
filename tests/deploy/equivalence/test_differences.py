"""Differences of outputs, batch by batch, of whatever type."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from ortrain.deploy.equivalence import differences
from ortrain.deploy.equivalence.differences import Difference
from ortrain.deploy.equivalence.report import OutputDifference


def between(*pairs: Any, mask: Any = None) -> OutputDifference:
    difference, first = Difference(), 0
    for before, after in pairs:
        difference.add(np.asarray(before), np.asarray(after), mask, first)
        first += len(before)
    return difference.found()


def test_batches_of_all_shapes_add_up() -> None:
    noise = np.random.default_rng(0)
    pairs = [(noise.standard_normal(s), noise.standard_normal(s)) for s in ((3, 4), (2, 7, 2))]
    found = between(*pairs)
    gaps = [np.abs(a - b) for a, b in pairs]
    every = np.concatenate([gap.reshape(-1) for gap in gaps])
    assert found.largest == every.max()
    assert found.mean == pytest.approx(every.mean())
    assert found.elements == sum(found.histogram) == 40
    assert found.relative == pytest.approx(every.max() / max(np.abs(a).max() for a, _ in pairs))
    worst = int(np.argmax([gap.max() for gap in gaps]))
    row = int(np.unravel_index(gaps[worst].argmax(), gaps[worst].shape)[0])
    assert found.example == row + (3 if worst else 0)


def test_large_outputs_are_compared_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0)
    before, after = noise.standard_normal((2, 5, 4, 3))
    mask = noise.random((5, 4)) > 0.3
    whole = between((before, after), mask=mask)
    monkeypatch.setattr(differences, "_AT_ONCE", 20)
    parts = between((before, after), mask=mask)
    assert parts.mean == pytest.approx(whole.mean, rel=1e-12)
    assert dataclasses.replace(parts, mean=whole.mean) == whole


def test_each_decade_has_its_place() -> None:
    gaps = [0.0, 5e-9, 1e-8, 5e-5, 0.5, 5.0, 50.0]
    found = between((np.zeros(7), np.array(gaps)))
    assert found.histogram == (2, 1, 0, 0, 1, 0, 0, 0, 1, 1, 1)


def test_half_precision_is_compared_in_double() -> None:
    found = between((np.float32([70000.0]), np.float16([65504.0])))
    assert found.largest == 4496
    assert found.new_nonfinite == 0
    overflown = between((np.float32([70000.0]), np.float16([np.inf])))
    assert overflown.new_nonfinite == 1


def test_whole_numbers_that_double_cannot_tell_apart_differ() -> None:
    large = np.array([2**60, 2**60], np.int64)
    assert between((large, large + np.array([0, 1]))).largest == 1
    assert between((large, large)).largest == 0
    assert between((np.array([True]), np.array([False]))).largest == 1


def test_texts_are_equal_or_not() -> None:
    assert between((["a", "b"], ["a", "b"])).new_nonfinite == 0
    found = between((["a", "b"], ["a", "c"]))
    assert found.new_nonfinite == 1
    assert found.example == 1


def test_outputs_without_elements_have_no_difference() -> None:
    found = between((np.zeros((2, 0)), np.zeros((2, 0))))
    assert (found.largest, found.mean, found.elements) == (0, 0, 0)


def test_the_first_example_that_is_not_finite_is_named() -> None:
    found = between(
        ([1.0, 2.0], [1.0, 9.0]), ([1.0, 2.0], [1.0, np.nan]), ([1.0, 2.0], [50.0, np.inf])
    )
    assert found.example == 3
    assert found.new_nonfinite == 2
    assert found.largest == 49


def test_padding_is_left_out_of_every_figure() -> None:
    mask = np.array([[True, False]])
    found = between((np.array([[[1.0], [100.0]]]), np.array([[[1.5], [0.0]]])), mask=mask)
    assert (found.largest, found.mean, found.elements, found.relative) == (0.5, 0.5, 1, 0.5)

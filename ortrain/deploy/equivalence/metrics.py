"""Metrics of predictions: one number a model, over all rows or some of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ortrain.deploy.equivalence.predictions import Rows, Side, spans
from ortrain.deploy.equivalence.tasks import FALLING, OF_TOKENS

Array = np.ndarray

OF_A_CLASS = ("recall", "f1")
"""What decides how a class has come through: who is missed, and who is taken for one of it."""


def measured(task: str, rows: Rows, side: Side, chosen: Array) -> dict[str, float]:
    """All metrics of a task.

    Args:
        task: one of ``TASKS``.
        rows: with labels.
        side: of these rows: the model before or after.
        chosen: which rows, of type bool.

    Returns:
        Metric → value. NaN for a correlation of what does not vary.
    """
    label, value = rows.label[chosen], side.value[chosen]
    if task == "regression":
        return {
            "mse": float(np.mean((value - label) ** 2)) if len(label) else math.nan,
            "correlation": _correlation(value, label),
        }
    right = float(np.mean(value == label)) if len(label) else math.nan
    if task == "question-answering":
        return {"exact": right, "f1": _overlap(value, label)}
    if task == "multi-label":
        return {"f1": _f1(*_counts(value, label, 1)), "accuracy": right}
    if task in OF_TOKENS and task != "token-classification":
        loss = float(np.mean(side.loss[chosen])) if len(label) else math.nan
        return {"accuracy": right, "loss": loss}
    there = np.union1d(label, value)
    each = [_f1(*_counts(value, label, number)) for number in there]
    return {"accuracy": right, "f1": float(np.mean(each)) if each else math.nan}


def measured_of_class(task: str, rows: Rows, side: Side, number: int) -> dict[str, float]:
    """Recall, precision and F1 of one class, or of one label of several.

    Args:
        task: that has classes.
        rows: with labels.
        side: of these rows.
        number: of the class.
    """
    label, value, positive = rows.label, side.value, number
    if task == "multi-label":
        own = rows.column == number
        label, value, positive = label[own], value[own], 1
    hits, false, missed = _counts(value, label, positive)
    return {
        "recall": hits / (hits + missed) if hits + missed else math.nan,
        "precision": hits / (hits + false) if hits + false else 0.0,
        "f1": _f1(hits, false, missed),
    }


def fall(before: Mapping[str, float], after: Mapping[str, float], names: Sequence[str]) -> float:
    """By how much the worst of some metrics is worse after; below 0 where all are better.

    Where one cannot be computed any more, infinitely; where it could not before, it does not count.
    """
    drops = []
    for name in names:
        old, new = before[name], after[name]
        if math.isnan(old):
            continue
        drop = new - old if name in FALLING else old - new
        drops.append(math.inf if math.isnan(drop) else drop)
    return max(drops, default=0.0)


def _counts(value: Array, label: Array, number: int) -> tuple[int, int, int]:
    """How often a class is found, wrongly found and missed."""
    said, true = value == number, label == number
    return int((said & true).sum()), int((said & ~true).sum()), int((~said & true).sum())


def _f1(hits: int, false: int, missed: int) -> float:
    """Of what was not there and was not found, 0, as in scikit-learn."""
    return 2 * hits / (2 * hits + false + missed) if hits + false + missed else 0.0


def _correlation(value: Array, label: Array) -> float:
    """Pearson's; NaN where one of both does not vary."""
    if len(label) < 2 or np.ptp(value) == 0 or np.ptp(label) == 0 or not np.isfinite(value).all():
        return math.nan
    return float(np.corrcoef(value, label)[0, 1])


def _overlap(value: Array, label: Array) -> float:
    """Mean F1 of the positions that an answer and the right one have in common."""
    if not len(label):
        return math.nan
    (first, last), (start, end) = spans(value), spans(label)
    common = np.maximum(np.minimum(last, end) - np.maximum(first, start) + 1, 0)
    length = np.maximum(last - first + 1, 0) + np.maximum(end - start + 1, 0)
    return float(np.mean(2 * common / np.maximum(length, 1)))

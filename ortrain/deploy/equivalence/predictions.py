"""Predictions of both models, one row for each thing that is predicted.

A row is an example, a token, a label that an example may have, or a number, by the task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ortrain.deploy.equivalence.tasks import OF_TOKENS, heads
from ortrain.errors import InputError

Array = np.ndarray

IGNORED = -100
"""The label of a token that has none."""

# Both positions of an answer as one number; no model reads longer texts.
_POSITIONS = 1 << 24


@dataclass(frozen=True)
class Side:
    """What one model predicts.

    Attributes:
        value: the class, whether the label holds (0 or 1), both positions, or the number.
        probability: of the predicted class; of class 1 where there are two, and of the label where
            an example may have several. NaN for numbers and positions.
        loss: the negative logarithm of the label's probability; NaN without one.
    """

    value: Array
    probability: Array
    loss: Array


@dataclass(frozen=True)
class Rows:
    """All predictions, in the order of the examples.

    Attributes:
        example: index of the example.
        column: of the label or the number among those of an example; else 0.
        label: what is right; unused where ``labelled`` is false.
        before: of the model before.
        after: of the model after.
        labelled: whether there are labels.
        classes: how many there are; 0 for numbers and positions.
    """

    example: Array
    column: Array
    label: Array
    before: Side
    after: Side
    labelled: bool
    classes: int

    @property
    def same(self) -> Array:
        """Which predictions stay as they were; numbers have none to stay."""
        return self.before.value == self.after.value


@dataclass
class Predictions:
    """Collects the predictions of a task, batch by batch.

    Args:
        task: one of ``TASKS``.
        labels: of all examples, or None.
    """

    task: str
    labels: Array | None
    classes: int = 0
    _are_probabilities: bool = False
    _parts: list[tuple[Array, ...]] = field(default_factory=list)

    def add(
        self,
        before: Mapping[str, Array],
        after: Mapping[str, Array],
        mask: Array | None,
        first: int,
    ) -> None:
        """Adds a batch.

        Args:
            before: the outputs, of the shapes of those after.
            after: the outputs.
            mask: ``[batch, length]``, false for padding.
            first: index of the batch's first example.

        Raises:
            InputError: labels do not fit the outputs.
        """
        names = heads(self.task, before)
        assert names is not None
        if not self._parts and names[0].rpartition("/")[2] != "logits":
            several = self.task == "multi-label"
            self._are_probabilities = _are_probabilities(before[names[0]], several=several)
        known = self._are_probabilities
        count = len(before[names[0]])
        labels = None if self.labels is None else self.labels[first : first + count]
        examples = np.arange(first, first + count)
        keep: Array | None = None
        if self.task == "question-answering":
            label = _answer_labels(labels, before[names[0]].shape, first)
            sides = [_answers(out[names[0]], out[names[1]], mask) for out in (before, after)]
            index = (examples, np.zeros(count, np.int64), label)
        elif self.task == "regression":
            numbers = [
                out[names[0]].reshape(count, -1).astype(np.float64) for out in (before, after)
            ]
            width = numbers[0].shape[1]
            label = _number_labels(labels, count, width, first).reshape(-1)
            none = np.full(count * width, np.nan)
            sides = [Side(each.reshape(-1), none, none) for each in numbers]
            index = (np.repeat(examples, width), np.tile(np.arange(width), count), label)
        elif self.task == "multi-label":
            logits = [out[names[0]] for out in (before, after)]
            self.classes = width = logits[0].shape[1]
            label = _flag_labels(labels, count, width, first).reshape(-1)
            sides = [_flags(each, known) for each in logits]
            index = (np.repeat(examples, width), np.tile(np.arange(width), count), label)
        else:
            logits = [out[names[0]] for out in (before, after)]
            self.classes = logits[0].shape[-1]
            if self.task in OF_TOKENS:
                label, keep = self._token_labels(labels, logits[0].shape, mask, first)
                if self.task == "causal-lm":
                    logits = [each[:, :-1] for each in logits]  # each token predicts the next one
            else:
                label = _class_labels(labels, count, self.classes, first)
            shape = logits[0].shape[:-1]
            rows = np.broadcast_to(
                examples.reshape((count,) + (1,) * (len(shape) - 1)), shape
            ).reshape(-1)
            label = label.reshape(-1)
            sides = [_chosen(each, label, known) for each in logits]
            index = (rows, np.zeros(len(rows), np.int64), label)
        part = [*index]
        for side in sides:
            part += [side.value, side.probability, side.loss]
        if keep is not None:
            part = [column[keep.reshape(-1)] for column in part]
        self._parts.append(tuple(part))

    def rows(self) -> Rows:
        """All that was added."""
        columns = [np.concatenate(each) for each in zip(*self._parts, strict=True)]
        example, column, label, *sides = columns
        before, after = (
            Side(value=value, probability=probability, loss=loss)
            for value, probability, loss in (sides[:3], sides[3:])
        )
        return Rows(
            example=example,
            column=column,
            label=label,
            before=before,
            after=after,
            labelled=self.labels is not None,
            classes=self.classes,
        )

    def _token_labels(
        self, labels: Array | None, shape: tuple[int, ...], mask: Array | None, first: int
    ) -> tuple[Array, Array]:
        """Labels ``[batch, length]`` of the positions that predict, and which of them count."""
        count, length, classes = shape
        valid = np.ones((count, length), np.bool_) if mask is None else mask
        if labels is None:
            found = np.zeros((count, length), np.int64)
            counts = valid
        else:
            _expect(labels.ndim == 2, labels, f"[examples, length], {IGNORED} for none")
            found = np.full((count, length), IGNORED, np.int64)
            width = min(length, labels.shape[1])
            found[:, :width] = labels[:, :width]
            beyond = labels[:, length:] != IGNORED
            if beyond.any():
                raise InputError(
                    f"example {first + int(np.argwhere(beyond)[0][0])} has labels behind its end",
                    because=f"its batch is {length} tokens wide, and there are more labels",
                    help=f"give one label for each token, and {IGNORED} for those without one",
                )
            counts = found != IGNORED
            _expect_range(found, counts & ((found < 0) | (found >= classes)), classes, first)
            found = np.where(counts, found, 0)
        if self.task == "causal-lm":
            return found[:, 1:], counts[:, 1:] & valid[:, :-1]
        return found, counts


def _expect(holds: bool, labels: Array, expected: str) -> None:
    if not holds:
        raise InputError(
            f"labels of shape {list(labels.shape)} and type {labels.dtype} do not fit the model",
            because=f"expected {expected}",
            help="give the labels of this task, or name another one: GoldenSet(…, task=…)",
        )


def _expect_range(labels: Array, wrong: Array, classes: int, first: int) -> None:
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0])
        raise InputError(
            f"example {first + int(at[0])} has the label {labels[at]:g}, which is no class of "
            "the model",
            because=f"it has {classes} classes, 0 to {classes - 1}",
            help="correct the label, or give the model that it belongs to",
        )


def _class_labels(labels: Array | None, count: int, classes: int, first: int) -> Array:
    if labels is None:
        return np.zeros(count, np.int64)
    _expect(labels.ndim == 1 and labels.dtype.kind in "iub", labels, "[examples] of whole numbers")
    found = labels.astype(np.int64)
    _expect_range(found, (found < 0) | (found >= classes), classes, first)
    return found


def _flag_labels(labels: Array | None, count: int, width: int, first: int) -> Array:
    if labels is None:
        return np.zeros((count, width), np.int64)
    expected = f"[examples, {width}] of zeros and ones"
    _expect(labels.shape[1:] == (width,) and labels.dtype.kind in "iubf", labels, expected)
    _expect_range(labels, ~np.isin(labels, (0, 1)), 2, first)
    return labels.astype(np.int64)


def _number_labels(labels: Array | None, count: int, width: int, first: int) -> Array:
    if labels is None:
        return np.zeros((count, width))
    fits = labels.dtype.kind in "iubf" and labels.size == count * width
    _expect(fits, labels, f"[examples, {width}] of numbers")
    found = labels.reshape(count, width).astype(np.float64)
    if not np.isfinite(found).all():
        raise InputError(
            f"example {first + int(np.argwhere(~np.isfinite(found))[0][0])} has a label that is no "
            "finite number",
            help="correct the label",
        )
    return found


def _answer_labels(labels: Array | None, shape: tuple[int, ...], first: int) -> Array:
    count, length = shape
    if labels is None:
        return np.zeros(count, np.int64)
    fits = labels.shape[1:] == (2,) and labels.dtype.kind in "iu"
    _expect(fits, labels, "[examples, 2], the first and the last position of the answer")
    wrong = (labels < 0) | (labels >= length)
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0])
        raise InputError(
            f"example {first + int(at[0])} has its answer at position {int(labels[at])}",
            because=f"its batch has {length} positions",
            help="correct the positions: they count tokens, special ones included",
        )
    found = labels.astype(np.int64)
    return found[:, 0] * _POSITIONS + found[:, 1]


def spans(values: Array) -> tuple[Array, Array]:
    """First and last positions of what question answering predicts."""
    return values // _POSITIONS, values % _POSITIONS


def _answers(start: Array, end: Array, mask: Array | None) -> Side:
    chosen = []
    for logits in (start, end):
        kept = logits if mask is None else np.where(mask, logits, -np.inf)
        chosen.append(kept.argmax(axis=1).astype(np.int64))
    none = np.full(len(start), np.nan)
    return Side(chosen[0] * _POSITIONS + chosen[1], none, none)


def _flags(logits: Array, known: bool) -> Side:
    x = logits.astype(np.float64).reshape(-1)
    if not known:
        with np.errstate(over="ignore"):
            x = 1 / (1 + np.exp(-x))
    none = np.full(len(x), np.nan)
    return Side((x >= 0.5).astype(np.int64), x, none)


def _chosen(logits: Array, label: Array, known: bool) -> Side:
    """Of ``[…, classes]``, or their probabilities; the labels are flat, one a row."""
    rows = logits.reshape(-1, logits.shape[-1])
    value = rows.argmax(axis=1).astype(np.int64)
    probability, loss = np.empty(len(rows)), np.empty(len(rows))
    # A vocabulary of 50 000 classes in float64 is 400 kB a row: some rows at a time.
    step = max(1, (1 << 22) // rows.shape[1])
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        x = rows[part].astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            if known:
                logs = np.log(np.maximum(x, np.finfo(np.float64).tiny))
            else:
                x = x - x.max(axis=1, keepdims=True)
                logs = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
        at = np.arange(len(logs))
        shown = np.ones(len(logs), np.int64) if rows.shape[1] == 2 else value[part]
        probability[part] = np.exp(logs[at, shown])
        loss[part] = -logs[at, label[part]]
    return Side(value, probability, loss)


def _are_probabilities(logits: Array, *, several: bool) -> bool:
    """Whether a model's last operator was the softmax or sigmoid already."""
    if not logits.size or not ((logits >= 0) & (logits <= 1)).all():
        return False
    return several or bool(np.abs(logits.astype(np.float64).sum(axis=-1) - 1).max() < 1e-3)

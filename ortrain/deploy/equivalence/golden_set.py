"""``GoldenSet``: the examples that a model is compared on before and after a rewrite."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class GoldenSet:
    """Examples in batches, with their labels and names of parts of them.

    Attributes:
        batches: inputs by their names, each an array with the batch as its first axis; batches may
            differ in every size.
        labels: of all examples in their order. ``[examples]`` of classes or of numbers,
            ``[examples, labels]`` of zeros and ones, ``[examples, 2]`` of the first and the last
            position of an answer, or ``[examples, longest]`` of classes of tokens, -100 for those
            that have none. None: predictions are compared with each other alone.
        slices: name → indices of examples; a metric is given for each.
        id2label: class → its name; without one it is its number.
        task: what the labels and the predictions are, one of ``TASKS``; by default it follows from
            the labels and the outputs.
        metric: that decides, one of the task's; by default its first.
    """

    batches: Sequence[Mapping[str, np.ndarray]]
    labels: np.ndarray | None = None
    slices: Mapping[str, Sequence[int]] = field(default_factory=dict)
    id2label: Mapping[int, str] = field(default_factory=dict)
    task: str | None = None
    metric: str | None = None

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        model: str | os.PathLike[str],
        *,
        text_column: str = "text",
        label_column: str = "label",
        slice_columns: Sequence[str] = (),
        batch_size: int = 8,
        max_length: int | None = None,
        limit: int | None = None,
    ) -> GoldenSet:
        raise NotImplementedError

    @classmethod
    def draw(
        cls,
        data: Iterable[Any],
        *,
        labels: str | np.ndarray | Sequence[Any] | None = None,
        limit: int = 256,
        batch_size: int = 8,
        slices: Mapping[str, Sequence[int]] | None = None,
        slice_columns: Sequence[str] = (),
        id2label: Mapping[int, str] | None = None,
        task: str | None = None,
        seed: int | None = None,
    ) -> GoldenSet:
        """From a datasets object, a DataLoader or any iterable: of rows, batches or (batch, label)."""
        raise NotImplementedError

    @property
    def examples(self) -> int:
        """How many examples there are."""
        return sum(len(next(iter(batch.values()))) for batch in self.batches)

"""How far outputs are apart: the largest and the mean difference, decade by decade."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ortrain.deploy.equivalence.report import OutputDifference

Array = np.ndarray

EDGES = tuple(10.0**power for power in range(-8, 2))
"""Of the histogram: below the first, between two, and from the last up; in absolute terms."""

# Elements: logits over a vocabulary take a dozen times their bytes in double precision.
_AT_ONCE = 1 << 22


@dataclass
class Difference:
    """One output, batch by batch."""

    largest: float = 0.0
    total: float = 0.0
    scale: float = 0.0
    elements: int = 0
    new_nonfinite: int = 0
    left_out: int = 0
    undefined: int = 0
    example: int = 0
    first_nonfinite: int = -1
    histogram: Array = field(default_factory=lambda: np.zeros(len(EDGES) + 1, np.int64))

    def add(self, before: Array, after: Array, mask: Array | None, first: int) -> None:
        """Adds a batch.

        Args:
            before: ``[batch, …]``, of any type.
            after: the same shape.
            mask: ``[batch, length]``, false where the first two axes are padding. What is there is
                not compared, but may not become NaN or infinite either.
            first: index of the batch's first example.
        """
        if before.ndim and before.size > _AT_ONCE and len(before) > 1:
            for row in range(len(before)):
                part = slice(row, row + 1)
                own = None if mask is None else mask[part]
                self.add(before[part], after[part], own, first + row)
            return
        gaps, differs, size = _gaps(before, after)
        kept = np.ones(gaps.shape, np.bool_)
        if mask is not None:
            shape = mask.shape + (1,) * (gaps.ndim - mask.ndim)
            kept = np.broadcast_to(mask.reshape(shape), gaps.shape)
        self.left_out += int(kept.size - kept.sum())
        if differs.any():
            self.new_nonfinite += int(differs.sum())
            if self.first_nonfinite < 0:
                self.first_nonfinite = first + (int(np.argwhere(differs)[0][0]) if gaps.ndim else 0)
        none = kept & _no_number(before) & _no_number(after)
        self.undefined += int(none.sum())
        counted = kept & ~differs & ~none
        if not counted.any():
            return
        values = np.where(counted, gaps, 0.0)
        self.scale = max(self.scale, float(size[kept].max()))
        largest = float(values.max())
        if largest > self.largest:
            row = int(np.unravel_index(int(values.argmax()), values.shape)[0]) if gaps.ndim else 0
            self.largest, self.example = largest, first + row
        self.total += float(values.sum())
        self.elements += int(counted.sum())
        decades = np.searchsorted(EDGES, values[counted], side="right")
        self.histogram += np.bincount(decades, minlength=len(EDGES) + 1)

    def found(self) -> OutputDifference:
        """The difference over all batches."""
        return OutputDifference(
            largest=self.largest,
            mean=self.total / self.elements if self.elements else 0.0,
            relative=self.largest / self.scale if self.scale else (np.inf if self.largest else 0.0),
            elements=self.elements,
            histogram=tuple(int(count) for count in self.histogram),
            new_nonfinite=self.new_nonfinite,
            example=self.example if self.first_nonfinite < 0 else self.first_nonfinite,
        )


def _no_number(array: Array) -> Array:
    """Where an array is NaN."""
    if array.dtype.kind in "UOSiub":
        return np.zeros(array.shape, np.bool_)
    return np.isnan(array.astype(np.float64))


def _gaps(before: Array, after: Array) -> tuple[Array, Array, Array]:
    """The differences, where they have none since one side is not finite, and the size before."""
    if before.dtype.kind in "UOS" or after.dtype.kind in "UOS":
        apart = before != after  # texts are as good as one another, or as bad as NaN
        return np.zeros(before.shape), apart, np.zeros(before.shape)
    old, new = before.astype(np.float64), after.astype(np.float64)
    finite = np.isfinite(old) & np.isfinite(new)
    same = (old == new) | (np.isnan(old) & np.isnan(new))  # also the same infinity
    with np.errstate(invalid="ignore"):
        gaps = np.where(finite, np.abs(old - new), 0.0)
    if before.dtype.kind in "iu" and after.dtype.kind in "iu":
        # float64 does not tell large whole numbers apart.
        gaps = np.where(before != after, np.maximum(gaps, 1.0), gaps)
    return gaps, ~finite & ~same, np.where(np.isfinite(old), np.abs(old), 0.0)

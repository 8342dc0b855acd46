"""Runs a function over strips of its operands, so that what it makes within stays small.

Of (2, 12, 512, 64) in bfloat16 the scores are 24 MiB in float32, and attention has three such
tensors at a time, which no cache holds; freed, they leave holes in the heap that are cut into
pieces before the next of the kind. In strips of 4 MiB attention's forward takes 13.1 ms on two
cores of a Zen 5 and its backward 18.9, at once 14.6 and 20.9; in strips of 1 MiB 14.8 and 30. A
step of BERT-base on 2 texts of 512 tokens has 953 MiB at its peak, with strips of 12 MiB 1017,
without strips 1095.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

# Elements of the scores in a strip.
STRIP = 1 << 20

Strip = tuple[slice, slice]


def run(
    body: Callable[..., list[Tensor]],
    operands: Sequence[Tensor],
    missing: Sequence[int],
    lead: int,
    scores: int,
) -> list[Tensor]:
    """The results of a function of batches and heads, computed a few of them at a time.

    Args:
        body: ``body(row, *operands)`` for the operands of a strip, whose first head is the row-th
            of all. Element (b, h) of its results depends on element (b, h) of its operands only.
        operands: [B, H, …] each, of which a size may be 1.
        missing: how many of these axes each operand does not have: 1 for [H, …].
        lead: how many of these axes there are: 2, or 1 for [B, …].
        scores: elements of the largest tensor that the body makes, for one batch and head.

    Returns:
        The results, [B, H, …] each.
    """
    shapes = [[1] * gone + [*x.shape] for x, gone in zip(operands, missing, strict=True)]
    sizes = [max(shape[axis] for shape in shapes) for axis in range(lead)]
    batch, heads = (*sizes, 1)[:2]
    if batch * heads * scores <= STRIP:
        return body(0, *operands)
    whole: list[Tensor] = []
    for rows, columns in _strips(batch, heads, scores):
        cuts = (rows, columns)[:lead]
        parts = [_part(x, cuts[gone:]) for x, gone in zip(operands, missing, strict=True)]
        found = body(rows.start * heads + columns.start, *parts)
        whole = whole or [x.new_empty([*sizes, *x.shape[lead:]]) for x in found]
        for result, part in zip(whole, found, strict=True):
            result[cuts] = part
    return whole


def _strips(batch: int, heads: int, scores: int) -> Iterator[Strip]:
    """Batches with all of their heads, as many as fit in; else some heads of one batch."""
    rows = min(batch, max(1, STRIP // (heads * scores)))
    columns = min(heads, max(1, STRIP // scores)) if rows == 1 else heads
    rows, columns = (math.ceil(n / math.ceil(n / k)) for n, k in ((batch, rows), (heads, columns)))
    for b in range(0, batch, rows):
        for h in range(0, heads, columns):
            yield slice(b, min(b + rows, batch)), slice(h, min(h + columns, heads))


def _part(x: Tensor, cuts: Sequence[slice]) -> Tensor:
    """A strip of an operand; an axis of size 1 stands for all."""
    return x[tuple(slice(None) if x.shape[i] == 1 else cut for i, cut in enumerate(cuts))]

"""How long two models take, in turn, so that what else happens on the machine meets both alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ortrain.deploy.equivalence.sessions import Runnable
from ortrain.deploy.progress import tracked
from ortrain.errors import OrtrainError

Array = np.ndarray
Batch = Mapping[str, Array]
Times = dict[str, tuple[float, float]]

# Runs before the clock counts: the first ones allocate.
_WARM_UP = 2
# Seconds after which a batch is timed no longer, once both models have had `_LEAST` turns.
_SECONDS = 10.0
_LEAST = 5


def timed(
    before: Runnable,
    after: Runnable,
    batches: Sequence[Batch],
    runs: int,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Times, Times, list[str]]:
    """Median and 95th percentile of runs, in milliseconds.

    One example alone, and the batch of median size, are timed; the models take turns.

    Args:
        before: the model before.
        after: the model after.
        batches: of the golden set.
        runs: how often each model runs on each batch.
        clock: seconds.

    Returns:
        Batch → (median, 95th percentile) of both, and notes of what could not be timed.
    """
    times: tuple[Times, Times] = ({}, {})
    notes: list[str] = []
    for name, batch in _chosen(batches).items():
        try:
            taken = _alternating(before, after, batch, runs, clock)
        except OrtrainError as error:
            # As one example of a model whose batch has a fixed size.
            notes.append(f"latency of {name} was not measured: {error.what}")
            continue
        for side, seconds in zip(times, taken, strict=True):
            milliseconds = np.asarray(seconds) * 1e3
            side[name] = (
                float(np.median(milliseconds)),
                float(np.percentile(milliseconds, 95)),
            )
    return *times, notes


def size_of(batch: Batch) -> str:
    """``8 x 64``: the shape of what a batch mainly is."""
    name = next((n for n in ("input_ids", "pixel_values", "input_features") if n in batch), None)
    array = batch[name] if name else max(batch.values(), key=lambda each: each.size)
    return " x ".join(str(size) for size in array.shape) or "1"


def _chosen(batches: Sequence[Batch]) -> dict[str, Batch]:
    def elements(batch: Batch) -> int:
        return sum(array.size for array in batch.values())

    middle = sorted(batches, key=elements)[len(batches) // 2]
    count = max(len(array) for array in middle.values() if array.ndim)
    single = {
        name: array[:1] if array.ndim and len(array) == count else array
        for name, array in middle.items()
    }
    return {size_of(batch): batch for batch in (single, middle)}


def _alternating(
    before: Runnable,
    after: Runnable,
    batch: Batch,
    runs: int,
    clock: Callable[[], float],
) -> tuple[list[float], list[float]]:
    taken: tuple[list[float], list[float]] = ([], [])
    started = clock()
    for turn in tracked(range(-_WARM_UP, runs), "timing", "turn"):
        # Who goes first changes, too: the second one finds the caches of the processor colder.
        order = (0, 1) if turn % 2 == 0 else (1, 0)
        for side in order:
            start = clock()
            for _ in (before, after)[side].answer(batch, "timing"):
                pass
            if turn >= 0:
                taken[side].append(clock() - start)
        if turn >= _LEAST and clock() - started > _SECONDS:
            break
    return taken

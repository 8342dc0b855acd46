"""The seed of a call: whatever runs its parts, one after another, draws the same.

Graphs, and PyTorch in their place, number their draws. A call takes one seed from PyTorch's
generator at its first draw; a graph is given the one at which its own numbers go on from there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Seeds:
    """Of one call.

    Attributes:
        drawn: streams so far.
    """

    def __init__(self) -> None:
        self._seed: int | None = None
        self.drawn = 0

    def next(self) -> tuple[int, int]:
        """The call's seed, and the number of the next stream."""
        if self._seed is None:
            self._seed = int(_from_generator())
        return self._seed, self.drawn


class _Here(threading.local):
    seeds: Seeds | None = None


_here = _Here()


def draw_of(seeds: Seeds | None) -> Seeds | None:
    """What this thread draws is for a call from now on; None draws a seed for each graph.

    Returns:
        For what it was before.
    """
    before, _here.seeds = _here.seeds, seeds
    return before


@contextmanager
def drawing(seeds: Seeds | None) -> Iterator[None]:
    """As :func:`draw_of`, for what is inside."""
    before = draw_of(seeds)
    try:
        yield
    finally:
        draw_of(before)


def draw_seed(streams: int) -> torch.Tensor:
    """A seed from PyTorch's generator, so that ``torch.manual_seed`` repeats a run; int64 scalar.

    Args:
        streams: that are drawn of it.
    """
    if (seeds := _here.seeds) is None:
        return _from_generator()
    from ortrain.ops.hash import advanced  # which loads onnx, as whatever draws here has done

    seed = advanced(*seeds.next())
    seeds.drawn += streams
    return torch.tensor(seed)


def _from_generator() -> torch.Tensor:
    return torch.empty((), dtype=torch.int64).random_()

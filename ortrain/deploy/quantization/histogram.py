"""``Histogram``: values counted in bins that are halved in number, never moved.

Bins are ``[i w, (i + 1) w)`` around zero with a width ``w`` that is a power of two. Where a value
is beyond the last bin, each two neighbours become one of twice the width, which loses nothing:
counting in the wider bins from the start would have given the same. So counts do not depend on the
order of what is counted, and those of shards add up to exactly those of all.
"""

from __future__ import annotations

import numpy as np

# Bins on each side of zero. The last one that is used is 1/2048 of the largest value or wider by at
# most a factor of two; a tensor's counts take 64 KiB.
SIDE = 4096
# Values of this size are no values: masks add the lowest number of their dtype.
MASK = 1e30
# The largest share of the values that entropy may cut.
_RARE = 0.01
# Values in a bin that say how frequent they are.
_ENOUGH = 8
_LEAST = -100  # 2**-100: smaller values than that are zero


class Histogram:
    """Counts of values.

    Attributes:
        low: the smallest value so far.
        high: the largest.
        count: how many there are.
        zeros: how many of them are zero, which any range has exactly.
        masked: whether a NaN, an infinity or a mask's number was among the values; these are not
            counted.
    """

    def __init__(self) -> None:
        self.low, self.high, self.count, self.masked = np.inf, -np.inf, 0, False
        self.zeros = 0
        self._exponent = _LEAST
        self._counts = np.zeros(2 * SIDE, np.int64)

    def add(self, values: np.ndarray) -> None:
        """Counts the values of an array of any shape."""
        flat = np.asarray(values, dtype=np.float32).reshape(-1)
        # Also what is not a number compares false here.
        inside = np.abs(flat) < MASK
        if not inside.all():
            self.masked = True
            flat = flat[inside]
        if not flat.size:
            return
        low, high = float(flat.min()), float(flat.max())
        self.low, self.high = min(self.low, low), max(self.high, high)
        self.count += flat.size
        self.zeros += int(flat.size - np.count_nonzero(flat))
        self._widen(max(-low, high))
        # A power of two divides a float32 without rounding; double for what is very small.
        scaled = np.floor(flat.astype(np.float64) * 2.0**-self._exponent).astype(np.int64)
        self._counts += np.bincount(scaled + SIDE, minlength=2 * SIDE)

    def merge(self, other: Histogram) -> None:
        """Counts what another one has counted; that one stays as it is."""
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.count += other.count
        self.zeros += other.zeros
        self.masked |= other.masked
        counts, exponent = other._counts, other._exponent
        if exponent > self._exponent:
            self._counts = _coarser(self._counts, exponent - self._exponent)
            self._exponent = exponent
        self._counts = self._counts + _coarser(counts, self._exponent - exponent)

    @property
    def width(self) -> float:
        """Of a bin."""
        return float(2.0**self._exponent)

    def percentile(self, percentile: float, *, symmetric: bool = False) -> tuple[float, float]:
        """The range that holds so many of a hundred values, with as many left out on both sides.

        Args:
            percentile: 0 to 100.
            symmetric: whether the range is symmetric; it then holds this share of the values'
                magnitudes.

        Returns:
            The lowest and the highest value of the range; both inside what was seen.
        """
        if not self.count:
            return 0.0, 0.0
        if symmetric:
            both = self._counts[SIDE:] + self._counts[SIDE - 1 :: -1]
            top = min(self._reached(both, percentile / 100), max(-self.low, self.high))
            return -top, top
        tail = (1 - percentile / 100) / 2
        high = self._reached(self._counts, 1 - tail) - SIDE * self.width
        low = SIDE * self.width - self._reached(self._counts[::-1], 1 - tail)
        inside = np.clip([low, high], self.low, self.high)
        return float(inside[0]), float(inside[1])

    def entropy(self, levels: int, bins: int) -> tuple[float, float]:
        """The symmetric range that loses least information in so many levels.

        For each range around zero, what is outside is moved to its borders, and the distribution is
        compared with itself in ``levels`` levels; the range with the smallest Kullback-Leibler
        divergence is taken (S. Migacz, 8-bit Inference with TensorRT, GTC 2017).

        Zeros do not count: with them, what a ReLU gives, or a softmax behind a causal mask, was cut
        at a ninth of its range. Neither does an order of few values say what is rare: with less
        than eight of them to a bin there are fewer bins, and with less than eight to each of twice
        the levels the range is that of the values.

        What is cut is rare: no more than a hundredth of the values. Of some that are all far from
        zero, as sigmoids around 0.5, up to 97 % were cut: moved to a border they are distributed
        there as in one level.

        Args:
            levels: that values are rounded to.
            bins: around zero that the range is chosen in.

        Returns:
            The lowest and the highest value of the range; both inside what was seen.
        """
        if not self.count:
            return 0.0, 0.0
        top = max(-self.low, self.high)
        if top == 0:
            return 0.0, 0.0
        bins = min(bins, (self.count - self.zeros) // _ENOUGH)
        if bins < 2 * levels:
            return self.low, self.high
        counts = self._rebinned(bins, top)
        middle, width = bins // 2, top / (bins // 2)
        best, chosen = np.inf, middle
        least = (1 - _RARE) * counts.sum()
        for half in range(levels // 2, middle + 1):
            if counts[middle - half : middle + half].sum() < least:
                continue
            divergence = _divergence(counts, middle - half, middle + half, levels)
            # Of equal ones the widest, which clips least.
            if divergence <= best:
                best, chosen = divergence, half
        reach = chosen * width
        return max(-reach, self.low), min(reach, self.high)

    def _widen(self, top: float) -> None:
        exponent = self._exponent
        while top >= SIDE * 2.0**exponent:
            exponent += 1
        if exponent > self._exponent:
            self._counts = _coarser(self._counts, exponent - self._exponent)
            self._exponent = exponent

    def _reached(self, counts: np.ndarray, share: float) -> float:
        """How far from the first bin so large a share of the values ends, inside a bin evenly."""
        total = np.cumsum(counts)
        wanted = share * self.count
        index = int(np.searchsorted(total, wanted, side="left"))
        if index >= len(counts):
            index = int(np.flatnonzero(counts)[-1])
        before = total[index - 1] if index else 0
        inside = (wanted - before) / counts[index] if counts[index] else 0.0
        return (index + min(max(inside, 0.0), 1.0)) * self.width

    def _rebinned(self, bins: int, top: float) -> np.ndarray:
        """Counts of all but zeros in even bins over ``[-top, top]``, of a bin by its parts."""
        counts = self._counts.copy()
        counts[SIDE] -= self.zeros
        total = np.concatenate([[0], np.cumsum(counts)]).astype(np.float64)
        borders = np.linspace(-top, top, bins + 1)
        at = np.arange(-SIDE, SIDE + 1) * self.width
        reached = np.interp(borders, at, total)
        reached[0], reached[-1] = 0, total[-1]
        return np.diff(reached)


def _coarser(counts: np.ndarray, steps: int) -> np.ndarray:
    """Counts in bins that are ``2 ** steps`` times as wide."""
    if steps == 0:
        return counts
    if steps >= 2 * SIDE.bit_length():  # all that was counted is next to zero
        result = np.zeros_like(counts)
        result[SIDE - 1], result[SIDE] = counts[:SIDE].sum(), counts[SIDE:].sum()
        return result
    for _ in range(steps):
        result = np.zeros_like(counts)
        quarter = SIDE // 2
        result[quarter : SIDE + quarter] = counts.reshape(-1, 2).sum(1)
        counts = result
    return counts


def _divergence(counts: np.ndarray, start: int, end: int, levels: int) -> float:
    """Of the counts between two bins, clipped, from the same in so many levels."""
    inner = counts[start:end]
    reference = inner.copy()
    reference[0] += counts[:start].sum()
    reference[-1] += counts[end:].sum()
    there = reference > 0
    edges = np.arange(levels) * len(inner) // levels
    sums = np.add.reduceat(inner, edges)
    filled = np.add.reduceat(there.astype(np.int64), edges)
    sizes = np.diff(np.append(edges, len(inner)))
    mean = np.divide(sums, filled, out=np.zeros(levels), where=filled > 0)
    candidate = np.where(there, np.repeat(mean, sizes), 0.0)
    p, q = _smooth(reference), _smooth(candidate)
    if p is None or q is None:
        return float("inf")
    return float((p * np.log(p / q)).sum())


def _smooth(counts: np.ndarray, least: float = 1e-4) -> np.ndarray | None:
    """Probabilities without zeros."""
    total = counts.sum()
    if total <= 0:
        return None
    shares = counts / total
    empty = shares < least / len(shares)
    shares = np.where(empty, least / len(shares), shares)
    return shares / shares.sum()

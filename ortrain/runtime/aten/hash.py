"""The random bits of a running function: those of :mod:`ortrain.ops.hash`.

The vectors of rows and of columns are computed on the host, or by :class:`Streams` on a device that
would have to wait for them. What has the size of a tensor is computed in int32: sums and products
wrap around to the bits that those of uint32 have, and a shift to the right is masked. PyTorch has
no comparison of uint32, and needs none: with the top bits flipped, numbers compare as signed ones
do, and as a column's number C is odd, ``(R + 2^31) * C`` is ``R * C`` with its top bit flipped. So
a mask costs one product and one comparison, and the flip a vector of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache

import numpy as np
import torch

from ortrain.ops.hash import U32, WEYL, halves_of, salts_of
from ortrain.ops.random import mixed

_TOP = 2**31

# Up to so many rows or columns the numbers of all streams are mixed together: 13 streams of 16384
# are 1.7 MB, and 14 launches where each stream by itself has as many.
_TOGETHER = 1 << 14


class Streams:
    """The numbers of the streams of a program, mixed on a device, as few launches as can be.

    Args:
        keys: of rows and columns, int32 [streams, 2] on the device; see :func:`spread`.
        streams: that the rows of the keys belong to.
    """

    def __init__(self, keys: torch.Tensor, streams: Sequence[int]) -> None:
        self.keys = keys
        self._places = {stream: place for place, stream in enumerate(streams)}
        self._mixed: dict[bool, torch.Tensor] = {}

    def row_key(self, stream: int) -> torch.Tensor:
        """That of the rows, int32 []."""
        return self.keys[self._places[stream], 0]

    def places(
        self, sizes: Sequence[int], stream: int, *, for_mask: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of :func:`_places`, which others may read: not to be written into."""
        columns, rows = sizes[-1] if len(sizes) else 1, math.prod(sizes[:-1])
        place, count = self._places[stream], max(rows, columns)
        if count > _TOGETHER:
            numbers = _mixed_on_device(self.keys[place : place + 1], count, for_mask)[0]
        else:
            known = self._mixed.get(for_mask)
            if known is None or known.shape[-1] < count:
                known = self._mixed[for_mask] = _mixed_on_device(self.keys, count, for_mask)
            numbers = known[place]
        return numbers[0, :rows].view([*sizes[:-1], 1]), numbers[1, :columns]


def _mixed_on_device(keys: torch.Tensor, count: int, for_mask: bool) -> torch.Tensor:
    """The mixed numbers of at least so many rows and columns, int32 [streams, 2, count or more]."""
    weyl = _weyl_on_device(keys.device, 1 << max(count - 1, 1023).bit_length())
    numbers = _mix_(weyl + keys.unsqueeze(-1))
    if for_mask:
        numbers.bitwise_or_(1)
        numbers[:, 0].bitwise_xor_(-_TOP)
    return numbers


@cache
def _weyl_on_device(device: torch.device, count: int) -> torch.Tensor:
    """``i * W``. The copy is waited for, so that any stream of the device may read it."""
    return torch.from_numpy((np.arange(count, dtype=U32) * U32(WEYL)).view(np.int32)).to(device)


Seed = torch.Tensor | int | Streams
"""The step's seed, int64 on the CPU; or what a device makes of it."""


def on_device(device: torch.device) -> bool:
    """Whether rows and columns are mixed there: a copy from the host takes longer, and waits."""
    return device.type != "cpu"


def spread(seed: torch.Tensor | int, streams: Iterable[int]) -> torch.Tensor:
    """The keys of streams, int32 [streams, 2] on the CPU."""
    found = _salts(tuple(streams)) + np.array(halves_of(int(seed)), U32)
    return torch.from_numpy(found.view(np.int32))


@lru_cache(maxsize=256)
def _salts(streams: tuple[int, ...]) -> np.ndarray:
    """In which the keys of streams differ, uint32 [streams, 2]."""
    return np.array([salts_of(stream) for stream in streams], U32).reshape(-1, 2)


def streams(seed: torch.Tensor | int, numbers: Sequence[int], device: torch.device) -> Streams:
    """The streams of a seed that the running function has computed."""
    return Streams(spread(seed, numbers).to(device, non_blocking=True), numbers)


def dropout(
    x: torch.Tensor,
    seed: Seed,
    stream: int,
    threshold: int,
    scale: float,
    index: torch.Tensor | None = None,
    first: int = 0,
) -> torch.Tensor:
    """``ortrain::Dropout``: what lies below the threshold is kept, times ``scale``.

    Args:
        x: floating, any shape.
        seed: the step's.
        stream: of the draw.
        threshold: see :func:`ortrain.ops.dropout.threshold`.
        scale: of what is kept.
        index: logical row of each row; absent: the rows in order.
        first: of the rows in order, on the CPU.
    """
    numbers = _compared(x.shape, seed, stream, x.device, index, first)
    if x.is_cuda:
        kept = numbers < threshold - _TOP
        dropped: torch.Tensor = torch.ops.aten.native_dropout_backward(x, kept, scale)
        return dropped
    # Comparisons to bool, and operators with one, take an element at a time on the CPU. In place
    # they give int32, and 0 or 1 times the bits of `scale` is 0 or `scale`, to be multiplied by x.
    # float32 and bfloat16 on two shared cores, in ms: (8, 128, 768) 0.8 and 0.7, with torch.where
    # 2.6 and 2.3, eager's dropout 14 and 12; (8, 12, 128, 128) 2.0 and 2.0, 13 and 9, 26 and 28.
    kept = numbers.lt_(threshold - _TOP)
    if x.dtype is torch.float32:
        return kept.mul_(_bits_of(scale)).view(torch.float32).mul_(x)
    return kept.to(x.dtype).mul_(x).mul_(scale)


def keep(
    sizes: Sequence[int],
    seed: Seed,
    stream: int,
    threshold: int,
    device: torch.device,
) -> torch.Tensor:
    """The bool mask of a dropout; see there."""
    kept = _compared(sizes, seed, stream, device).lt_(threshold - _TOP)
    return kept.to(torch.uint8).view(torch.bool)


def bits(sizes: Sequence[int], seed: Seed, stream: int, device: torch.device) -> torch.Tensor:
    """32 bits an element, as int32."""
    rows, columns = _places(sizes, seed, stream, device)
    return _mix_(rows + columns).view(sizes)


def _compared(
    sizes: Sequence[int],
    seed: Seed,
    stream: int,
    device: torch.device,
    index: torch.Tensor | None = None,
    first: int = 0,
) -> torch.Tensor:
    """Each element's number in the mask, its top bit flipped."""
    rows, columns = _places(sizes, seed, stream, device, for_mask=True, first=first)
    if index is not None:
        row_key = (
            seed.row_key(stream)
            if isinstance(seed, Streams)
            else _signed(keys(int(seed), stream)[0])
        )
        rows = _mix_(index.to(torch.int32).mul_(_signed(WEYL)).add_(row_key))
        rows = rows.bitwise_or_(1).bitwise_xor_(-_TOP).unsqueeze(-1)
    elif len(sizes) < 2:
        return columns.bitwise_xor(-_TOP) if len(sizes) else rows.view([]).clone()
    return rows * columns


def _places(
    sizes: Sequence[int],
    seed: Seed,
    stream: int,
    device: torch.device,
    *,
    for_mask: bool = False,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mixed numbers of rows [..., 1] and columns [C]; for a mask odd, and rows flipped.

    In numpy: 16 us for 1024 rows of 768 columns, in PyTorch 42 us.
    """
    if isinstance(seed, Streams):
        return seed.places(sizes, stream, for_mask=for_mask)
    columns, rows = sizes[-1] if len(sizes) else 1, math.prod(sizes[:-1])
    row_key, column_key = keys(int(seed), stream)
    numbers = _weyl(rows, columns) + U32(row_key)
    numbers[rows:] += U32((column_key - row_key) % 2**32)
    if first:
        numbers[:rows] += U32(first * WEYL % 2**32)
    numbers = mixed(numbers)
    if for_mask:
        numbers |= U32(1)
        numbers[:rows] ^= U32(_TOP)
    numbers = numbers.view(np.int32)
    row = torch.from_numpy(numbers[:rows].reshape([*sizes[:-1], 1]))
    column = torch.from_numpy(numbers[rows:])
    return row.to(device, non_blocking=True), column.to(device, non_blocking=True)


@lru_cache(maxsize=64)
def _weyl(rows: int, columns: int) -> np.ndarray:
    """``i * W`` of the rows, and after them of the columns."""
    return np.concatenate([np.arange(n, dtype=U32) for n in (rows, columns)]) * U32(WEYL)


def _mix_(h: torch.Tensor) -> torch.Tensor:
    """``mix`` of :mod:`ortrain.ops.hash`, in place."""
    h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    h.bitwise_xor_((h >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(0x846CA68B))
    return h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF))


def keys(seed: int, stream: int) -> tuple[int, int]:
    """Those of rows and columns, 32 bits each."""
    row, column = zip(halves_of(seed), salts_of(stream), strict=True)
    return sum(row) % 2**32, sum(column) % 2**32


def _signed(number: int) -> int:
    """The int32 of the same bits."""
    return number - 2**32 if number >= _TOP else number


def _bits_of(number: float) -> int:
    """The int32 of the bits that the number has in float32."""
    return int(np.float32(number).view(np.int32))


__all__ = ["Streams", "bits", "dropout", "keep", "keys", "on_device", "spread", "streams"]

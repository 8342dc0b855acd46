"""The random bits of a running function: those of :mod:`ortrain.ops.hash`.

The vectors of rows and of columns are computed on the host, and what has the size of a tensor in
int32: sums and products wrap around to the bits that those of uint32 have, and a shift to the right
is masked. PyTorch has no comparison of uint32, and needs none: with the top bits flipped, numbers
compare as signed ones do, and as a column's number C is odd, ``(R + 2^31) * C`` is ``R * C`` with
its top bit flipped. So a mask costs one product and one comparison, and the flip a vector of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from ortrain.ops.hash import U32, WEYL, salt_of
from ortrain.ops.random import mixed

_TOP = 2**31


def dropout(
    x: torch.Tensor,
    seed: torch.Tensor | int,
    stream: int,
    threshold: int,
    scale: float,
    index: torch.Tensor | None = None,
) -> torch.Tensor:
    """``ortrain::Dropout``: what lies below the threshold is kept, times ``scale``.

    Args:
        x: floating, any shape.
        seed: the step's, int64 on the CPU.
        stream: of the draw.
        threshold: see :func:`ortrain.ops.dropout.threshold`.
        scale: of what is kept.
        index: logical row of each row; absent: the rows in order.
    """
    numbers = _compared(x.shape, seed, stream, x.device, index)
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
    seed: torch.Tensor | int,
    stream: int,
    threshold: int,
    device: torch.device,
) -> torch.Tensor:
    """The bool mask of a dropout; see there."""
    kept = _compared(sizes, seed, stream, device).lt_(threshold - _TOP)
    return kept.to(torch.uint8).view(torch.bool)


def bits(
    sizes: Sequence[int], seed: torch.Tensor | int, stream: int, device: torch.device
) -> torch.Tensor:
    """32 bits an element, as int32."""
    rows, columns = _places(sizes, seed, stream, device)
    return _mix_(rows + columns).view(sizes)


def _compared(
    sizes: Sequence[int],
    seed: torch.Tensor | int,
    stream: int,
    device: torch.device,
    index: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each element's number in the mask, its top bit flipped."""
    rows, columns = _places(sizes, seed, stream, device, for_mask=True)
    if index is not None:
        row_key = _signed(keys(int(seed), stream)[0])
        rows = _mix_(index.to(torch.int32).mul_(_signed(WEYL)).add_(row_key))
        rows = rows.bitwise_or_(1).bitwise_xor_(-_TOP).unsqueeze(-1)
    elif len(sizes) < 2:
        return columns.bitwise_xor_(-_TOP) if len(sizes) else rows.view([])
    return rows * columns


def _places(
    sizes: Sequence[int],
    seed: torch.Tensor | int,
    stream: int,
    device: torch.device,
    *,
    for_mask: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mixed numbers of rows [..., 1] and columns [C]; for a mask odd, and rows flipped.

    In numpy: 16 us for 1024 rows of 768 columns, in PyTorch 42 us.
    """
    columns, rows = sizes[-1] if len(sizes) else 1, math.prod(sizes[:-1])
    row_key, column_key = keys(int(seed), stream)
    numbers = _weyl(rows, columns) + U32(row_key)
    numbers[rows:] += U32((column_key - row_key) % 2**32)
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
    salt = salt_of(stream)
    high = abs(seed) // 2**32 * (1 if seed >= 0 else -1)  # ONNX divides towards zero
    first = _mix(seed % 2**32)
    second = _mix((high + first) % 2**32)
    return first ^ (salt % 2**32), second ^ (salt >> 32)


def _mix(h: int) -> int:
    h = (h ^ (h >> 16)) * 0x7FEB352D % 2**32
    h = (h ^ (h >> 15)) * 0x846CA68B % 2**32
    return h ^ (h >> 16)


def _signed(number: int) -> int:
    """The int32 of the same bits."""
    return number - 2**32 if number >= _TOP else number


def _bits_of(number: float) -> int:
    """The int32 of the bits that the number has in float32."""
    return int(np.float32(number).view(np.int32))


__all__ = ["bits", "dropout", "keep", "keys"]

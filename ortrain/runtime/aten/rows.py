"""Gradients of tables, in memory that stays.

A step writes a few thousand rows of a table of 30,000. As a fresh tensor its gradient is zeroed
page by page by the operating system and once more by PyTorch: 94 MB took 45 ms of a step of 454.
Pages that stay are zeroed in 1.7 ms. To zero only the rows that the last step wrote would take 0.1,
but whoever had the gradient may have written others, and by ``grad.data`` without a trace.
"""

from __future__ import annotations

import weakref

import torch

from ortrain.runtime.aten.owners import is_alone
from ortrain.runtime.memory import POOLS

# Smaller ones come from the heap, whose pages stay.
LARGE = 16 << 20


_TABLES = weakref.WeakSet["Table"]()


def _release() -> None:
    for table in list(_TABLES):
        table.release()


POOLS["gradients of tables"] = _release


class Table:
    """The gradient of one table, on the CPU.

    What it hands out is the optimizer's and the user's until they let go of it: as long as they
    hold it, its memory is not used again.
    """

    def __init__(self) -> None:
        # Taken out while a thread works on it; another thread makes its own meanwhile.
        self._kept: list[torch.Tensor] = []
        _TABLES.add(self)

    def release(self) -> None:
        """Lets go of its memory until the next gradient."""
        self._kept.clear()

    def gradient(
        self, dy: torch.Tensor, indices: torch.Tensor, count: int, padding: int
    ) -> torch.Tensor:
        """Zeros, with ``dy`` added at the indices.

        Args:
            dy: [..., width].
            indices: [...], from 0 to ``count`` - 1.
            count: rows of the table.
            padding: of an index that adds nothing; -1 for none.

        Returns:
            [count, width].
        """
        width = dy.shape[-1]
        if count * width * dy.element_size() < LARGE:
            return torch.ops.aten.embedding_dense_backward.default(
                dy, indices, count, padding, False
            )
        indices, dy = indices.reshape(-1), dy.reshape(-1, width)
        if padding >= 0:
            dy = dy.masked_fill((indices == padding).unsqueeze(-1), 0)
        table = self._zeros(count, width, dy)
        table.index_add_(0, indices, dy)
        self._kept.append(table)
        return table.detach()

    def _zeros(self, count: int, width: int, like: torch.Tensor) -> torch.Tensor:
        try:
            table = self._kept.pop()
        except IndexError:
            return like.new_zeros(count, width)
        fits = table.shape == (count, width) and table.dtype is like.dtype
        return table.zero_() if fits and is_alone(table) else like.new_zeros(count, width)

"""Gradients of tables, in memory that stays: of it only the rows that were written are cleared.

A step writes a few thousand rows of a table of 30,000. As a fresh tensor its gradient is zeroed
page by page by the operating system and once more by PyTorch: 94 MB took 45 ms of a step of 454.
"""

from __future__ import annotations

import torch

# Smaller ones come from the heap, whose pages stay.
LARGE = 16 << 20

_uses = torch._C._storage_Use_Count


class Table:
    """The gradient of one table, on the CPU.

    What it hands out is the optimizer's and the user's until they let go of it. As long as they
    hold it, or where they have changed it, nothing of it is used again.
    """

    def __init__(self) -> None:
        # Taken out while a thread works on it; another thread makes its own meanwhile.
        self._kept: list[tuple[torch.Tensor, torch.Tensor, int]] = []

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
        table = self._cleared(count, width, dy)
        table.index_add_(0, indices, dy)
        self._kept.append((table, indices.clone(), table._version))
        return table.detach()

    def _cleared(self, count: int, width: int, like: torch.Tensor) -> torch.Tensor:
        try:
            table, written, version = self._kept.pop()
        except IndexError:
            return like.new_zeros(count, width)
        # This tensor and the object that tells of its storage are two.
        alone = _uses(table.untyped_storage()._cdata) == 2
        if not alone or table.shape != (count, width) or table.dtype is not like.dtype:
            return like.new_zeros(count, width)
        if table._version != version:  # clipped, or scaled: all of it may be other than zero
            return table.zero_()
        return table.index_fill_(0, written, 0)

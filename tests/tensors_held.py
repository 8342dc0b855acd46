"""Bytes of PyTorch's tensors that live at once, counted while a step runs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorsHeld(TorchDispatchMode):
    """Counts what is made while it is on, for as long as it lives.

    Attributes:
        now: bytes that live.
        most: that lived at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        before = [a for a in tree_leaves([args, kwargs]) if isinstance(a, torch.Tensor)]
        for tensor in before:
            self._known.setdefault(tensor.untyped_storage(), None)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._take(tensor.untyped_storage())
        self.most = max(self.most, self.now)
        return result

    def _take(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._known:
            self._known[storage] = None
            self.now += storage.nbytes()
            weakref.finalize(storage, self._drop, storage.nbytes())

    def _drop(self, size: int) -> None:
        self.now -= size

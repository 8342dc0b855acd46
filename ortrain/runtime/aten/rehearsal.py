"""How much memory generated functions hold, line by line, without computing anything.

They run on tensors that have sizes and strides and no contents, PyTorch's fake tensors: which call
gives a view and which one copies is PyTorch's own knowledge. What kernels take for themselves while
they run, such as a packed operand, is not seen.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FILE = "<ortrain "


class Held(TorchDispatchMode):
    """Counts the bytes of tensors that are made while it is on, for as long as each lives.

    Attributes:
        now: bytes at this moment.
        curve: line of the generated function that ran, and bytes held after each call in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.curve: list[tuple[str, int, int]] = []
        self._known: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()

    def ignore(self, tensor: torch.Tensor) -> None:
        """Has a tensor that was there before count for nothing."""
        self._known[tensor.untyped_storage()] = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._take(tensor.untyped_storage())
        name, line = _place()
        self.curve.append((name, line, self.now))
        return result

    def _take(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known[storage] = None
        size = storage.nbytes()
        self.now += size
        weakref.finalize(storage, self._drop, size)

    def _drop(self, size: int) -> None:
        self.now -= size


def _place() -> tuple[str, int]:
    """The generated function that is running, and its line."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(FILE):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return "", 0

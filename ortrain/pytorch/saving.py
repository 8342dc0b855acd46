"""Hooks on saved tensors: which are on, code that runs without them, and without any saved."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

_autograd: Any = torch._C._autograd
saving_hooks: Callable[[bool], Any] = _autograd._top_saved_tensors_default_hooks
"""``saving_hooks(False)``: the last that were set, to pack and to unpack; None without any."""

_pop: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks
_push: Callable[[Any, Any], None] = _autograd._push_saved_tensors_default_hooks


@contextlib.contextmanager
def unhooked() -> Iterator[None]:
    """What is saved for a backward inside is not for the caller's hooks: checkpointing counts it.

    Hooks of one's own in front of them, which keep the tensors as they are, would do the same but
    for memory: an output that an operator saves through hooks holds that operator, and so itself.
    """
    hooks = list[tuple[Any, Any]]()
    while (top := saving_hooks(False)) is not None:
        hooks.append(top)
        _pop()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            _push(pack, unpack)

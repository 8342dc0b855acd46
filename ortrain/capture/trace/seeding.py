"""A forward that seeds PyTorch's generator, or puts its state back, is noticed.

In eager such a forward draws the same numbers at every step, or the same twice in one; a graph
would draw new ones.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from ortrain.capture.origin import TORCH
from ortrain.capture.trace.aside import is_aside
from ortrain.exclusive import this_thread

_SEEDS = ("manual_seed", "seed", "set_state")


class _Generator:
    """The default generator, as :mod:`torch.random` uses it while a forward is traced."""

    def __init__(self, own: torch.Generator, calls: list[str]) -> None:
        self._own, self._calls, self._here = own, calls, this_thread()

    def __getattr__(self, name: str) -> Any:
        if name in _SEEDS and self._here() and not is_aside() and not _by_dynamo():
            self._calls.append(name)
        return getattr(self._own, name)


def _by_dynamo() -> bool:
    """Whether Dynamo puts a state back around a body of control flow that it has looked at."""
    frame: FrameType | None = sys._getframe(2)
    between = {torch.random.__file__, f"{TORCH}_dynamo/eval_frame.py"}  # it wraps manual_seed()
    while frame is not None and frame.f_code.co_filename in between:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(f"{TORCH}_dynamo/")


@contextlib.contextmanager
def seeding_watched() -> Iterator[list[str]]:
    """Collects the calls inside that set the state of PyTorch's generator."""
    random: Any = torch.random
    own, calls = random.default_generator, list[str]()
    random.default_generator = _Generator(own, calls)
    try:
        yield calls
    finally:
        random.default_generator = own

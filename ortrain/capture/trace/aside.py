"""Beside a trace: code that runs while a module is traced, and of which the trace sees nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from ortrain.module_state.dispatch import without_modes


class _State(threading.local):
    depth = 0
    answers: list[tuple[str, str]] | None = None


_state = _State()


def is_aside() -> bool:
    """Whether this thread is beside its trace."""
    return _state.depth > 0


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Inside, nothing is recorded, and nothing is refused of what is asked of autograd."""
    _state.depth += 1
    try:
        with without_modes(), torch._C.DisableTorchFunction():
            yield
    finally:
        _state.depth -= 1


@contextlib.contextmanager
def answers_noted() -> Iterator[list[tuple[str, str]]]:
    """What code that runs aside asks of how tensors lie in memory, each with the answer."""
    found: list[tuple[str, str]] = []
    before, _state.answers = _state.answers, found
    try:
        yield found
    finally:
        _state.answers = before


def note_answer(question: str, answer: object) -> bool:
    """Notes what code that runs aside was told; False where nobody takes note."""
    if _state.answers is None:
        return False
    _state.answers.append((question, str(answer)))
    return True

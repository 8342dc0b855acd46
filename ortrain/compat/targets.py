"""``tokenizer.as_target_tokenizer()``: a block in which a tokenizer is that of the targets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def as_target_tokenizer(self: Any) -> Iterator[None]:
    """Within the block ``tokenizer(texts)`` is ``tokenizer(text_target=texts)``.

    It matters to tokenizers of several languages, which put another mark in front of a target.
    """
    _switch(self, "target")
    # Transformers' own __call__ reads it: without, each call would switch back before it encodes.
    self._in_target_context_manager = True
    try:
        yield
    finally:
        self._in_target_context_manager = False
        _switch(self, "input")


def extend(module: ModuleType) -> None:
    """Adds the method where tokenizers lack it.

    Args:
        module: that of all tokenizers' base.
    """
    base: Any = getattr(module, "PreTrainedTokenizerBase", None)
    if base is not None and not hasattr(base, "as_target_tokenizer"):
        base.as_target_tokenizer = as_target_tokenizer


def _switch(tokenizer: Any, mode: str) -> None:
    """Only tokenizers to which it makes a difference have the two methods."""
    if hasattr(tokenizer, f"_switch_to_{mode}_mode"):
        getattr(tokenizer, f"_switch_to_{mode}_mode")()

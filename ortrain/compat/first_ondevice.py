"""On-device training as ONNX Runtime 1.13 had it, of which the first examples are.

``CheckpointState(path)`` loads, ``module([x, labels])`` takes a list, with labels in 32 bits, and
``module.reset_grad()`` is what became ``lazy_reset_grad``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np


def extend_checkpoint(module: ModuleType) -> None:
    """Has ``CheckpointState`` take a file.

    Args:
        module: ``ortrain.ondevice.running.checkpoint``.
    """
    kind = module.CheckpointState
    own = kind.__init__

    @functools.wraps(own)
    def made(self: Any, content: Any) -> None:
        if isinstance(content, str | os.PathLike | bytes):
            content = module.checkpoint_file.read(content)
        own(self, content)

    kind.__init__ = made


def extend_module(module: ModuleType) -> None:
    """Has ``Module`` take what it took then.

    Args:
        module: ``ortrain.ondevice.running.module``.
    """
    kind = module.Module
    own = kind.__call__

    @functools.wraps(own)
    def called(self: Any, *user_inputs: Any) -> Any:
        if len(user_inputs) == 1 and isinstance(user_inputs[0], list | tuple):
            user_inputs = _widened(self, user_inputs[0])
        return own(self, *user_inputs)

    def save_checkpoint(self: Any, ckpt_uri: Any) -> None:
        type(self.state).save_checkpoint(self.state, ckpt_uri)

    kind.__call__ = called
    kind.reset_grad = kind.lazy_reset_grad
    kind.save_checkpoint = save_checkpoint


def _widened(module: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Inputs of a list; whole numbers of 32 bits as the 64 that a model of today takes."""
    kinds = [argument.type for argument in module._current()._arguments]
    kinds += [""] * (len(inputs) - len(kinds))  # too many of them is told by the call
    return tuple(
        value.astype(np.int64)
        if kind == "tensor(int64)" and getattr(value, "dtype", None) == np.int32
        else value
        for value, kind in zip(inputs, kinds, strict=False)
    )

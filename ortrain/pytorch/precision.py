"""How float32 is multiplied, and the other settings that kernels read at each call.

Private: ``torch._C._get_fp32_precision_getter`` and ``_set_fp32_precision_setter``, behind
``torch.backends.cuda.matmul.fp32_precision`` and the like, which cost 20 us a question; and the
getters behind ``torch.backends.cudnn`` and ``torch.backends.cuda``. Without the first two what a
user has set stays on, and products in bfloat16 are not served.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_C: Any = torch._C
KNOWN = hasattr(_C, "_set_fp32_precision_setter")
"""Whether PyTorch has such settings; before 2.9 it has not."""


def precision_of(backend: str, operator: str) -> str:
    """How a backend multiplies float32 in an operator: ``"ieee"``, ``"tf32"``, ``"bf16"``."""
    found: str = _C._get_fp32_precision_getter(backend, operator)
    return found


def set_precision(backend: str, operator: str, precision: str) -> None:
    """Has a backend multiply float32 so."""
    _C._set_fp32_precision_setter(backend, operator, precision)


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """On GPUs, float32 is multiplied as such.

    cuDNN's recurrent layers, which one engine may have and the other not, round to TF32 by default.
    """
    parts = ("matmul", "conv", "rnn") if KNOWN and torch.cuda.is_available() else ()
    before = {part: precision_of("cuda", part) for part in parts}
    try:
        for part in parts:
            set_precision("cuda", part, "ieee")
        yield
    finally:
        for part, precision in before.items():
            set_precision("cuda", part, precision)


def settings_of_kernels() -> tuple[Any, ...]:
    """All settings that kernels of a GPU read at each call: 1 us."""
    return (
        _C._get_fp32_precision_getter("cuda", "matmul"),
        _C._get_fp32_precision_getter("cuda", "conv"),
        _C._get_fp32_precision_getter("cuda", "rnn"),
        _C._get_cudnn_enabled(),
        _C._get_cudnn_benchmark(),
        _C._get_cudnn_deterministic(),
        _C._get_deterministic_algorithms(),
        _C._get_cublas_allow_fp16_reduced_precision_reduction(),
        _C._get_cublas_allow_bf16_reduced_precision_reduction(),
        _C._get_cublas_allow_fp16_accumulation(),
    )

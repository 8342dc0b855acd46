"""PyTorch's functions below their Python, and what its allocators count.

Private: ``torch._C._nn``, ``_DisableAutocast``, ``_from_dlpack``, ``_storage_Use_Count``,
``_cuda_endAllocateToPool``, ``torch._cudnn_rnn_flatten_weight``, and ``_use_count`` and ``_cdata``
of tensors and storages. They are what Python's functions call, without what those cost each time.
Without them the engine that uses them fails to load.
"""

from __future__ import annotations

from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

nn: Any = torch._C._nn
"""The functions of ``torch.nn.functional`` that are written in C++."""

without_autocast_keys: Any = torch._C._DisableAutocast
"""``with without_autocast_keys():`` has operators pass autocast by: 0.3 us."""

to_dlpack: Any = torch._C._to_dlpack
from_dlpack: Any = torch._C._from_dlpack

_storage_uses: Any = torch._C._storage_Use_Count
_tensor_uses: Any = methodcaller("_use_count")

clear_cublas_workspaces: Any = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
"""Has cuBLAS give back the memory that it keeps for each stream."""

flatten_rnn_weights: Any = torch._cudnn_rnn_flatten_weight
"""Moves the weights of recurrent layers into the one piece of memory that cuDNN reads."""

in_linear_pointwise: Any = (
    torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None
)
"""oneDNN's product with what follows it element by element; None without oneDNN."""


def uses_in_cpp(tensor: Tensor) -> tuple[int, int]:
    """How many have a tensor in C++, and its memory."""
    return _tensor_uses(tensor), _storage_uses(tensor.untyped_storage()._cdata)


def memory_of(tensor: Tensor) -> int:
    """What tells whether two tensors show the same memory, fake ones among them."""
    return tensor.untyped_storage()._cdata


def end_allocation(device: int, pool: Any) -> None:
    """Has a GPU's allocator leave a pool, after a capture that could not be ended."""
    torch._C._cuda_endAllocateToPool(device, pool)


def convolves_narrow(bfloat: bool) -> bool:
    """Whether oneDNN convolves bfloat16, or float16, on this processor."""
    asked = torch.ops.mkldnn
    supported = asked._is_mkldnn_bf16_supported if bfloat else asked._is_mkldnn_fp16_supported
    return bool(supported())

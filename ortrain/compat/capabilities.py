"""What scripts ask of a build of onnxruntime, answered for the stock one with ortrain."""

from __future__ import annotations

import importlib.util
import re
import warnings
from typing import TYPE_CHECKING

from ortrain.errors import OrtrainWarning

if TYPE_CHECKING:
    from torch.torch_version import TorchVersion


def is_ortmodule_available() -> bool:
    """Whether ORTModule works here: where PyTorch is installed."""
    return importlib.util.find_spec("torch") is not None


def is_triton_enabled() -> bool:
    """False: the stock onnxruntime runs no Triton kernels."""
    return False


def is_torch_interop_default_on() -> bool:
    """False: no Python function is called from inside a graph."""
    return False


def get_runtime_pytorch_version() -> TorchVersion:
    """PyTorch's version without what stands behind a plus; compares with text and tuples."""
    import torch
    from torch.torch_version import TorchVersion

    return TorchVersion(re.split(r"[+]", torch.__version__)[0])


def enable_custom_autograd_support(to_enable: bool = True) -> None:
    """Does nothing, and says so where it is asked to switch something off.

    A module with a custom autograd function is captured or runs in PyTorch, always.
    """
    if not to_enable:
        warnings.warn(
            "enable_custom_autograd_support(False) does nothing: no graph calls Python functions; "
            "see custom autograd functions in docs/limits.md",
            OrtrainWarning,
            stacklevel=2,
        )

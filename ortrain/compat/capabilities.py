"""What scripts ask of a build of onnxruntime, answered for the stock one with ortrain."""

from __future__ import annotations

import importlib.util
import os
import re
from typing import TYPE_CHECKING

# Below this version of PyTorch nothing runs; a test compares it with what the package asks for.
MINIMUM_RUNTIME_PYTORCH_VERSION_STR = "2.11"

if TYPE_CHECKING:
    from torch.torch_version import TorchVersion


def is_ortmodule_available() -> bool:
    """Whether ORTModule works here: where PyTorch is installed."""
    return importlib.util.find_spec("torch") is not None


def is_triton_enabled() -> bool:
    """False: the stock onnxruntime runs no Triton kernels."""
    return False


def is_torch_interop_default_on() -> bool:
    """True: custom autograd functions are nodes of a graph that PyTorch runs."""
    return True


def get_runtime_pytorch_version() -> TorchVersion:
    """PyTorch's version without what stands behind a plus; compares with text and tuples."""
    import torch
    from torch.torch_version import TorchVersion

    return TorchVersion(re.split(r"[+]", torch.__version__)[0])


def enable_custom_autograd_support(to_enable: bool = True) -> None:
    """Whether custom autograd functions are nodes of graphs, of modules wrapped from here on.

    It sets the variable of this process from which ``Options.custom_autograd`` has its default.
    """
    os.environ["ORTMODULE_ENABLE_CUSTOM_AUTOGRAD"] = "1" if to_enable else "0"

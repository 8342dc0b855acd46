"""The policies of a fallback to PyTorch, and the old names of the errors behind them.

The old classes are those of :mod:`ortrain.errors`, so that ``except`` catches what is raised.
"""

from __future__ import annotations

import enum

from ortrain.errors import CaptureError, NotServed, OrtrainError, UnsupportedData


class _FallbackPolicy(enum.IntFlag):
    """The old policies; ``ORTMODULE_FALLBACK_POLICY`` takes their names."""

    FALLBACK_DISABLE = 1
    FALLBACK_FORCE_TORCH_FORWARD = 2
    FALLBACK_FORCE_TORCH_BACKWARD = 4
    FALLBACK_UNSUPPORTED_DEVICE = 8
    FALLBACK_UNSUPPORTED_DATA = 16
    FALLBACK_UNSUPPORTED_TORCH_MODEL = 32
    FALLBACK_UNSUPPORTED_ONNX_MODEL = 64
    FALLBACK_BAD_INITIALIZATION = 128

    def is_set(self, policy: _FallbackPolicy) -> bool:
        """Whether this has something of another policy."""
        return bool(policy & self)

    def is_disabled(self) -> bool:
        """Whether nothing falls back."""
        return _FallbackPolicy.FALLBACK_DISABLE in self


# What fell back where no variable was set, and whether each step tried again.
ORTMODULE_FALLBACK_POLICY = (
    _FallbackPolicy.FALLBACK_UNSUPPORTED_DEVICE
    | _FallbackPolicy.FALLBACK_UNSUPPORTED_DATA
    | _FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL
    | _FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL
)
ORTMODULE_FALLBACK_RETRY = False

ORTModuleFallbackException = OrtrainError
ORTModuleInitException = OrtrainError
ORTModuleDeviceException = NotServed
ORTModuleIOException = UnsupportedData
ORTModuleIOError = UnsupportedData
ORTModuleTorchModelException = CaptureError
# Of gradients, graphs and runtimes, which have no base of their own.
ORTModuleONNXModelException = OrtrainError

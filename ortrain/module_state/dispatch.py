"""The modes of PyTorch's dispatcher, which a trace and a certificate switch on around a call."""

from __future__ import annotations

from typing import Any

from torch.utils import _python_dispatch

without_modes: Any = _python_dispatch._disable_current_modes
"""Inside of ``with without_modes():`` an operator computes, and no mode of any kind sees it."""

"""Where a test runs: on the CPU, and on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    ],
)
DEVICES = ["cpu", GPU]

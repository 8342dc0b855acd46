"""``set_seed``: the random numbers of graphs follow PyTorch's generator."""

from __future__ import annotations

from ortrain.extras import require

require("torch", __name__)

import onnxruntime
import torch


def set_seed(seed: int) -> None:
    """Seeds what a training draws from: PyTorch's generator, of which graphs have their seeds.

    Args:
        seed: a whole number; onnxruntime's own generator gets it as well.
    """
    torch.manual_seed(seed)
    onnxruntime.set_seed(seed)

"""Optimizers for torch, built on its fused and foreach kernels.

`FusedAdam` does in one pass over memory what Adam with L2 regularization, the AdamW of transformers
and the AdamW of torch each do; `Lamb` and `SGD` do the same for theirs. `clip_grad_norm_` reads the
gradients once and writes them only where it has to. `FP16_Optimizer` speeds up the loss scaling of
other libraries.
"""

from __future__ import annotations

from ortrain.extras import require

require("torch", __name__)

from ortrain.optim.adam import FusedAdam
from ortrain.optim.adam_mode import AdamWMode
from ortrain.optim.clip import clip_grad_norm_
from ortrain.optim.fp16_optimizer import FP16_Optimizer
from ortrain.optim.lamb import Lamb
from ortrain.optim.sgd import SGD

__all__ = ["SGD", "AdamWMode", "FP16_Optimizer", "FusedAdam", "Lamb", "clip_grad_norm_"]

"""Optimizers by description, and their learning rates by step."""

from __future__ import annotations

from ortrain.classic.optim import lr_scheduler
from ortrain.classic.optim.config import AdamConfig, LambConfig, SGDConfig, _OptimizerConfig

__all__ = ["AdamConfig", "LambConfig", "SGDConfig", "_OptimizerConfig", "lr_scheduler"]

"""Scalers of the loss, for mixed precision."""

from __future__ import annotations

from ortrain.classic.amp.loss_scaler import DynamicLossScaler, LossScaler

__all__ = ["DynamicLossScaler", "LossScaler"]

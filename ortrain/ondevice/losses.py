"""Losses for ``loss=`` of the artifacts, which `making.losses` has."""

from ortrain.extras import require

require("onnx", __name__)

from ortrain.ondevice.making.losses import (
    REDUCTIONS,
    BCEWithLogitsLoss,
    CrossEntropyLoss,
    L1Loss,
    Loss,
    MSELoss,
)

__all__ = ["REDUCTIONS", "BCEWithLogitsLoss", "CrossEntropyLoss", "L1Loss", "Loss", "MSELoss"]

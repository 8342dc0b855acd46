"""Optimizers as ONNX graphs, for ``optimizer=`` of the artifacts; `making.optim` has them."""

from ortrain.extras import require

require("onnx", __name__)

from ortrain.ondevice.making.optim import (
    SGD,
    Adam,
    AdamW,
    Group,
    Lion,
    Optimizer,
    Slot,
    State,
    Update,
    emit,
    optimizer_program,
    states,
)

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Group",
    "Lion",
    "Optimizer",
    "Slot",
    "State",
    "Update",
    "emit",
    "optimizer_program",
    "states",
]

"""Optimizers as ONNX graphs, for ``optimizer=`` of the artifacts.

``emit`` puts an update into any graph, ``optimizer_program`` makes the optimizer model of it.
"""

from ortrain.extras import require

require("onnx", __name__)

from ortrain.ondevice.optim.adam import Adam, AdamW
from ortrain.ondevice.optim.base import Group, Optimizer
from ortrain.ondevice.optim.blocks import Slot
from ortrain.ondevice.optim.emit import Update, emit
from ortrain.ondevice.optim.lion import Lion
from ortrain.ondevice.optim.program import State, optimizer_program, states
from ortrain.ondevice.optim.sgd import SGD

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

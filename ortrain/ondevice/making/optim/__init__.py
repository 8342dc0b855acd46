"""Optimizers as ONNX graphs, for ``optimizer=`` of the artifacts.

``emit`` puts an update into any graph, ``optimizer_program`` makes the optimizer model of it.
"""

from ortrain.ondevice.making.optim.adam import Adam, AdamW
from ortrain.ondevice.making.optim.base import Group, Optimizer
from ortrain.ondevice.making.optim.blocks import Slot
from ortrain.ondevice.making.optim.emit import Update, emit
from ortrain.ondevice.making.optim.lion import Lion
from ortrain.ondevice.making.optim.program import State, optimizer_program, states
from ortrain.ondevice.making.optim.sgd import SGD

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

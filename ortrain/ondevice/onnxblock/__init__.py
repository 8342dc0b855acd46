"""Models for training, put together of blocks.

Scripts for ``onnxruntime.training.onnxblock`` run with this package in its place. See
docs/ondevice-onnxblock.md.
"""

from ortrain.extras import require

require("onnx", __name__)

from ortrain.ondevice.making.base import base, custom_op_library, empty_base
from ortrain.ondevice.making.block import Block
from ortrain.ondevice.onnxblock import blocks, loss, optim
from ortrain.ondevice.onnxblock.checkpoint import load_checkpoint_to_model, save_checkpoint
from ortrain.ondevice.onnxblock.models import ForwardBlock, Parameters, TrainingBlock

__all__ = [
    "Block",
    "ForwardBlock",
    "Parameters",
    "TrainingBlock",
    "base",
    "blocks",
    "custom_op_library",
    "empty_base",
    "load_checkpoint_to_model",
    "loss",
    "optim",
    "save_checkpoint",
]

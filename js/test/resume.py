"""Goes on training from a checkpoint of JavaScript.

python resume.py FOLDER CHECKPOINT RESULT
"""

from __future__ import annotations

import sys
from pathlib import Path

from loop import EVERY
from safetensors.numpy import load_file

from ortrain.ondevice import CheckpointState, Module, Optimizer


def resume(folder: Path, checkpoint: Path, result: Path) -> None:
    """Trains on the batches that the checkpoint has not seen, and saves what comes of it."""
    batches = load_file(folder / "batches")
    state = CheckpointState.load_checkpoint(checkpoint)
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    for index in range(state.seed, len(batches["input"])):
        module(batches["input"][index], batches["labels"][index])
        if index % EVERY == EVERY - 1:
            optimizer.step()
            module.lazy_reset_grad()
    CheckpointState.save_checkpoint(state, result, include_optimizer_state=True)


if __name__ == "__main__":
    resume(*map(Path, sys.argv[1:]))

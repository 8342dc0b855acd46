"""Trains artifacts as a device does. Run by test_stock.py, where nothing else is installed.

    python stock.py FOLDER

Each folder in it holds artifacts and ``batches.npz``, of arrays [steps, rows, ...] by input.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from ortrain.ondevice import CheckpointState, Module, Optimizer, TrainStep

RATE = 0.001


def main(root: Path) -> None:
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        models = (folder / "training_model.onnx", state, folder / "eval_model.onnx")
        module = Module(*models)
        batches = dict(np.load(folder / "batches.npz"))
        rows = list(zip(*(batches[name] for name in module.input_names()), strict=True))
        if folder.name.endswith("file"):
            optimizer = Optimizer(folder / "optimizer_model.onnx", module)
            optimizer.set_learning_rate(RATE)
        else:
            step = TrainStep(folder / "train_step_model.onnx", state)
            step.set_learning_rate(RATE)
        losses = []
        for row in rows:
            if folder.name.endswith("file"):
                losses.append(module(*row)[0])
                optimizer.step()
                module.lazy_reset_grad()
            else:
                losses.append(step(*row)[0])
        module.eval()
        loss, output = module(*rows[0])
        np.savez(folder / "results.npz", losses=losses, loss=loss, output=output)
        CheckpointState.save_checkpoint(state, folder / "trained")
        module.export_model_for_inferencing(folder / "inference.onnx", ["output"])
    foreign = {"torch", "onnx", "onnx_ir", "onnxscript", "ml_dtypes", "transformers"}
    assert not foreign & set(sys.modules)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Makes what the tests train: artifacts, batches, and the weights of the same steps in Python.

python artifacts.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from loop import train
from safetensors.numpy import save_file
from torch import nn

from ortrain.ondevice import CheckpointState, LossType, generate_artifacts
from ortrain.ondevice.optim import AdamW

STEPS, BATCH = 100, 8


def cnn() -> nn.Module:
    """Buffers, a seed, a frozen parameter; no parameter whose true gradient is zero.

    Such a one would be moved by rounding noise: a bias before a normalization.
    """
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(96, 10),
    )
    model[1].weight.requires_grad_(False)
    return model


def mlp() -> nn.Module:
    """What runs on WebGPU as well."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))


def make(folder: Path, model: nn.Module, optimizer: AdamW) -> None:
    """Artifacts, ``batches`` and ``expected`` of one model."""
    generate_artifacts(
        model,
        loss=LossType.CrossEntropyLoss,
        optimizer=optimizer,
        example_inputs=[torch.zeros(4, 1, 8, 8)],
        artifact_directory=folder,
        additional_output_names=["output"],
        nominal_checkpoint=True,
        ort_format=True,
    )
    checkpoint = folder / "checkpoint"
    state = CheckpointState.load_checkpoint(checkpoint)
    state.learning_rate = 0.002
    values = {"epoch": 2, "loss": 2.0, "name": 'the "first"', "big": 2**60}
    for name, value in values.items():
        state.properties[name] = value
    CheckpointState.save_checkpoint(state, checkpoint, include_optimizer_state=True)
    rng = np.random.default_rng(0)
    images = rng.random((STEPS, BATCH, 1, 8, 8), np.float32)
    labels = rng.integers(0, 10, (STEPS, BATCH))
    labels[::3, 1:3] = -100  # PyTorch's label of what is to be ignored
    save_file({"input": images, "labels": labels}, folder / "batches")
    save_file(train(folder, images, labels), folder / "expected")


if __name__ == "__main__":
    torch.manual_seed(0)
    make(Path(sys.argv[1]) / "cnn", cnn(), AdamW())
    make(Path(sys.argv[1]) / "mlp", mlp(), AdamW(max_norm=0.5))

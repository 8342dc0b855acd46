"""Makes what the tests train: artifacts, batches, and the weights of the same steps in Python.

python artifacts.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from loop import train
from placeholder import add_optimizer
from safetensors.numpy import save_file
from torch import nn

from ortrain.ondevice.artifacts import LossType, generate_artifacts

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


def make(folder: Path, model: nn.Module) -> None:
    """Artifacts, ``batches`` and ``expected`` of one model."""
    example = torch.zeros(4, 1, 8, 8)
    generate_artifacts(
        model,
        loss=LossType.CrossEntropyLoss,
        example_inputs=[example],
        artifact_directory=folder,
        additional_output_names=["output"],
    )
    tensors = {name: t.detach().numpy() for name, t in model.state_dict(keep_vars=True).items()}
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    add_optimizer(folder, tensors, trained)
    rng = np.random.default_rng(0)
    images = rng.random((STEPS, BATCH, 1, 8, 8), np.float32)
    labels = rng.integers(0, 10, (STEPS, BATCH))
    save_file({"input": images, "labels": labels}, folder / "batches")
    expected = train(folder, folder / "checkpoint", images, labels)
    save_file(expected, folder / "expected", {"trained": json.dumps(trained)})


if __name__ == "__main__":
    torch.manual_seed(0)
    for name, model in {"cnn": cnn(), "mlp": mlp()}.items():
        make(Path(sys.argv[1]) / name, model)

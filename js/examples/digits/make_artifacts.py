"""Makes what the page trains: a small network and scikit-learn's digits, in ``artifacts/``."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from sklearn.datasets import load_digits
from torch import nn

from ortrain.ondevice.artifacts import LossType, generate_artifacts

sys.path.append(str(Path(__file__).parents[2] / "test"))
from placeholder import add_optimizer  # noqa: E402

FOLDER = Path(__file__).parent / "artifacts"


def network() -> nn.Module:
    """Scores of ten digits, for images [N, 1, 8, 8] from 0 (paper) to 1 (ink)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def main() -> None:
    torch.manual_seed(0)
    model = network()
    generate_artifacts(
        model,
        loss=LossType.CrossEntropyLoss,
        example_inputs=[torch.zeros(4, 1, 8, 8)],
        artifact_directory=FOLDER,
        additional_output_names=["output"],
    )
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    add_optimizer(FOLDER, tensors, list(tensors))
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = digits.images[order].reshape(-1, 1, 8, 8).astype(np.float32) / 16
    labels = digits.target[order].astype(np.int64)
    save_file({"images": images, "labels": labels}, FOLDER / "digits.safetensors")


if __name__ == "__main__":
    main()

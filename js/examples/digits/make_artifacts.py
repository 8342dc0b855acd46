"""Makes what the page trains: a small network and scikit-learn's digits, in ``artifacts/``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from sklearn.datasets import load_digits
from torch import nn

from ortrain.ondevice import LossType, OptimType, generate_artifacts

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
    """Writes the artifacts and the data."""
    torch.manual_seed(0)
    generate_artifacts(
        network(),
        loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.AdamW,
        example_inputs=[torch.zeros(4, 1, 8, 8)],
        artifact_directory=FOLDER,
        additional_output_names=["output"],
    )
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = digits.images[order].reshape(-1, 1, 8, 8).astype(np.float32) / 16
    labels = digits.target[order].astype(np.int64)
    save_file({"images": images, "labels": labels}, FOLDER / "digits.safetensors")


if __name__ == "__main__":
    main()

"""Artifacts of six architectures, trained where there is neither PyTorch nor the onnx package."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTModel

from ortrain.ondevice import LossType, generate_artifacts
from ortrain.ondevice.optim import AdamW
from tests.ondevice.making.test_artifacts import cnn, exported, mlp, names_of
from tests.ondevice.stock import RATE

STEPS, ROWS, CLASSES = 50, 8, 5
ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, input: Tensor) -> Tensor:
        states, _ = self.lstm(input)
        return self.head(states[:, -1])


class Inverted(nn.Module):
    """The block of MobileNetV2: expand, depthwise, project; added to its input where it fits."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        wide = 3 * inner
        self.body = nn.Sequential(
            nn.Conv2d(inner, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, padding=1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, outer, 1, bias=False),
            nn.BatchNorm2d(outer),
        )
        self.adds = stride == 1 and inner == outer

    def forward(self, input: Tensor) -> Tensor:
        return input + self.body(input) if self.adds else self.body(input)


def mobilenet() -> nn.Module:
    blocks = [Inverted(4, 4, 1), Inverted(4, 6, 2), Inverted(6, 6, 1)]
    stem = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False)
    pooled = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, CLASSES)]
    return nn.Sequential(stem, nn.BatchNorm2d(4), nn.ReLU6(), *blocks, *pooled)


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = ViTConfig(**SMALL, image_size=8, patch_size=4, num_channels=1)
        self.body = ViTModel(config, add_pooling_layer=False)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, input: Tensor) -> Tensor:
        return self.head(self.body(input).last_hidden_state[:, 0])


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(**SMALL, vocab_size=40, max_position_embeddings=16, num_labels=CLASSES)
        self.body = BertForSequenceClassification(config)

    def forward(self, input: Tensor) -> Tensor:
        return self.body(input).logits


MODELS = {
    "MLP": (mlp, (10,)),
    "CNN": (cnn, (1, 8, 8)),
    "LSTM": (LSTM, (7, 6)),
    "MobileNet": (mobilenet, (3, 16, 16)),
    "ViT": (ViT, (1, 8, 8)),
    "BERT": (Bert, None),
}
# A parameter whose gradient is 0 but for rounding, such as a bias before a normalization, must not
# be moved by that: so eps is well above it.
OPTIMIZER = {"weight_decay": 0.01, "eps": 1e-4}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has ortrain's wheel, numpy, onnxruntime, safetensors, and what these need."""
    folder = tmp_path_factory.mktemp("device")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder / "wheel"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (wheel,) = (folder / "wheel").glob("*.whl")
    packages = folder / "packages"
    packages.mkdir()
    for name in ("numpy", "onnxruntime", "safetensors", "flatbuffers", "protobuf", "packaging"):
        distribution = importlib.metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files or () if ".." not in file.parts}
        for top in tops:
            link = packages / top
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))).resolve())
    command = [sys.executable, "-m", "zipfile", "-e", wheel, packages]
    subprocess.run(command, check=True, timeout=60)
    return packages


@pytest.fixture(scope="module")
def trained(device: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder where all of them were trained, and the modules as they were before."""
    root = tmp_path_factory.mktemp("artifacts")
    modules = {}
    for name, (make, shape) in MODELS.items():
        torch.manual_seed(5)
        module = make()
        # No padding: a file does not say which row of an embedding is not trained.
        x = (
            torch.randint(1, 40, (STEPS, ROWS, 6))
            if shape is None
            else torch.randn(STEPS, ROWS, *shape)
        )
        labels = torch.randint(0, CLASSES, (STEPS, ROWS))
        modules[name] = (module, x, labels)
        for source in ("module", "file"):
            folder = root / f"{name} {source}"
            folder.mkdir()
            model: Any = module
            if source == "file":
                model = exported(module, x[0], folder / "model.onnx")
            generate_artifacts(
                model,
                requires_grad=names_of(module),
                loss=LossType.CrossEntropyLoss,
                optimizer=AdamW(**OPTIMIZER),
                artifact_directory=folder,
                additional_output_names=["output"],
                example_inputs=(x[0],) if source == "module" else None,
            )
            np.savez(folder / "batches.npz", input=x.numpy(), labels=labels.numpy())
    script = Path(__file__).with_name("stock.py")
    # Without the site module there are no packages but those on the path.
    done = subprocess.run(
        [sys.executable, "-S", "-s", "-W", "error", script, root],
        env={**os.environ, "PYTHONPATH": str(device)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return root, modules


@pytest.mark.slow
@pytest.mark.parametrize("source", ["module", "file"])
@pytest.mark.parametrize("name", MODELS)
def test_fifty_steps_end_where_pytorch_ends(
    trained: tuple[Path, dict[str, Any]], name: str, source: str
) -> None:
    root, modules = trained
    initial, x, labels = modules[name]
    module, folder = MODELS[name][0](), root / f"{name} {source}"
    # An exporter runs the module, and writes the running statistics that follow.
    module.load_state_dict(
        {**initial.state_dict(), **load_file(folder / "checkpoint")}, strict=False
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, **OPTIMIZER)
    losses = []
    for batch, wanted in zip(x, labels, strict=True):
        loss = F.cross_entropy(module(batch), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = np.load(folder / "results.npz")
    np.testing.assert_allclose(found["losses"], losses, rtol=1e-5)
    weights = load_file(folder / "trained")
    for parameter, value in module.named_parameters():
        if parameter in weights:
            torch.testing.assert_close(weights[parameter], value.detach(), **CLOSE)
    for buffer, value in module.named_buffers():
        if buffer in weights:
            torch.testing.assert_close(weights[buffer], value, **CLOSE)

    module.eval()
    output = module(x[0]).detach()
    np.testing.assert_allclose(found["output"], output, **CLOSE)
    np.testing.assert_allclose(found["loss"], F.cross_entropy(output, labels[0]), rtol=1e-5)
    session = onnxruntime.InferenceSession(folder / "inference.onnx")
    (inferred,) = session.run(None, {"input": x[0].numpy()})
    np.testing.assert_allclose(inferred, found["output"], rtol=1e-5, atol=1e-5)

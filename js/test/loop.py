"""The training loop of the contract: what other languages are compared with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from safetensors import safe_open
from safetensors.numpy import load_file

# Batches whose gradients are accumulated for an update.
EVERY = 2


def train(folder: Path, images: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Weights, losses and the first gradients of training on batches, one after another."""
    models = {
        name: ort.InferenceSession(folder / f"{name}_model.onnx")
        for name in ("training", "optimizer", "eval")
    }
    checkpoint = folder / "checkpoint"
    tensors: dict[str, Any] = load_file(checkpoint)
    with safe_open(checkpoint, framework="np") as file:
        metadata = file.metadata()
    rate = np.array([float(metadata["learning_rate"])], np.float32)
    states = json.loads(metadata["states"])
    tensors |= {state["name"]: np.zeros(state["shape"], np.float32) for state in states}
    inputs = {i.name: i for i in models["training"].get_inputs()}
    suffix = "_grad.accumulation.buffer"
    trained = [name.removesuffix(suffix) for name in inputs if name.endswith(suffix)]
    gradients = {name: np.zeros_like(tensors[name]) for name in trained}
    first: dict[str, np.ndarray] = {}
    losses = []
    step = np.zeros(1, np.int64)
    for index, (x, y) in enumerate(zip(images, labels, strict=True)):
        feeds = {**tensors, "input": x, "labels": y, "seed": np.array([index], np.int64)}
        feeds |= {f"{name}{suffix}": gradient for name, gradient in gradients.items()}
        feeds["lazy_reset_grad"] = np.array([index % EVERY == 0])
        outputs = run(models["training"], feeds)
        losses.append(outputs["loss"])
        gradients = {name: outputs[f"{name}_grad.accumulation.out"] for name in trained}
        first = first or {f"gradient:{name}": gradient for name, gradient in gradients.items()}
        if index % EVERY == EVERY - 1:
            feeds = {**tensors, "step": step, "learning_rate": rate}
            feeds |= {f"{name}_grad": gradient for name, gradient in gradients.items()}
            outputs |= run(models["optimizer"], feeds)
            step = outputs["step.updated"]
        tensors |= {n: outputs[f"{n}.updated"] for n in tensors if f"{n}.updated" in outputs}
    loss = run(models["eval"], {**tensors, "input": images[0], "labels": labels[0]})["loss"]
    return {**tensors, **first, "losses": np.array(losses), "eval_loss": loss}


def run(session: ort.InferenceSession, feeds: dict[str, Any]) -> dict[str, np.ndarray]:
    """All outputs, by name."""
    names = [output.name for output in session.get_outputs()]
    wanted = {i.name: feeds[i.name] for i in session.get_inputs()}
    return dict(zip(names, session.run(names, wanted), strict=True))

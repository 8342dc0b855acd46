"""The model of `artifacts` in PyTorch, and the loops that tests compare."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ortrain.ondevice import CheckpointState, Module, Optimizer, TrainStep
from tests.ondevice import artifacts


class Eager:
    """The same forward, with autograd for its gradients and torch's own optimizers."""

    def __init__(self, optimizer: str = "adamw", learning_rate: float = 0.01) -> None:
        self.values = {name: torch.from_numpy(v) for name, v in artifacts.initial().items()}
        trained = [self.values[name].requires_grad_() for name in artifacts.TRAINED]
        self.optimizer: torch.optim.Optimizer
        if optimizer == "sgd":
            self.optimizer = torch.optim.SGD(trained, learning_rate)
        else:
            self.optimizer = torch.optim.AdamW(
                trained,
                learning_rate,
                betas=artifacts.BETAS,
                eps=artifacts.EPS,
                weight_decay=artifacts.WEIGHT_DECAY,
            )
        self.clips = optimizer == "adamw"
        self.seed = 0

    def __call__(
        self, x: np.ndarray, labels: np.ndarray, training: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values = self.values
        z = torch.from_numpy(x) @ values["fc1.weight"]
        factor = values["scale"]
        mean = values["norm.mean"]
        if training:
            mean = z.mean(0)
            factor = factor * (1 + self.seed / 100)
            with torch.no_grad():
                values["norm.mean"].lerp_(mean, artifacts.MOMENTUM)
            self.seed += 1
        logits = torch.relu(z - mean) * factor @ values["fc2.weight"] + values["fc2.bias"]
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels))
        if training:
            loss.backward()
        return loss, logits

    def update(self) -> float:
        """One update; the norm of the gradients."""
        trained = [self.values[name] for name in artifacts.TRAINED]
        bound = artifacts.MAX_NORM if self.clips else float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(trained, bound))
        self.optimizer.step()
        return norm


def load(folder: Path, file: str = "checkpoint") -> tuple[CheckpointState, Module, Optimizer]:
    """A state with its module and optimizer."""
    state = CheckpointState.load_checkpoint(folder / file)
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    return state, module, Optimizer(folder / "optimizer_model.onnx", module)


def fused(folder: Path) -> tuple[CheckpointState, TrainStep]:
    """A state with its fused step."""
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    return state, TrainStep(folder / "train_step_model.onnx", state)


def values(state: CheckpointState) -> dict[str, np.ndarray]:
    """Copies of all parameters and buffers."""
    return {name: item.data.copy() for name, item in (*state.parameters, *state.buffers)}


def assert_close(state: CheckpointState, eager: Eager) -> None:
    """Parameters and buffers are those of PyTorch."""
    for name, value in values(state).items():
        expected = eager.values[name].detach().numpy()
        np.testing.assert_allclose(value, expected, rtol=2e-5, atol=2e-6, err_msg=name)


def assert_same(one: CheckpointState, other: CheckpointState) -> None:
    """Parameters and buffers are equal bit for bit."""
    others = values(other)
    for name, value in values(one).items():
        assert value.tobytes() == others[name].tobytes(), name

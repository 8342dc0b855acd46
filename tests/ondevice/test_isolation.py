"""On a device there is neither PyTorch nor the onnx package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import torch

from ortrain import ondevice
from ortrain.ondevice import CheckpointState, LinearLRScheduler, TrainStep
from tests.ondevice.artifacts import batch
from tests.ondevice.eager import assert_same, load

ROOT = Path(__file__).parents[2]


def test_training_needs_numpy_onnxruntime_and_safetensors_alone(
    adamw: Path, tmp_path: Path
) -> None:
    for number in range(4):
        x, labels = batch(6, number)
        np.savez(tmp_path / f"{number}.npz", x=x, labels=labels)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("on_device.py")
    command = [sys.executable, "-W", "error", script, adamw, tmp_path]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    trained = CheckpointState.load_checkpoint(tmp_path / "whole")
    assert trained.properties["batches"] == 2

    # The same in one go and in this process, where the packages are loaded.
    state, module, optimizer = load(adamw)
    scheduler = LinearLRScheduler(optimizer, 1, 8, 0.05)
    for number in range(4):
        module(*batch(6, number))
        optimizer.step()
        scheduler.step()
        module.lazy_reset_grad()
    TrainStep(adamw / "train_step_model.onnx", state)(*batch(6, 0))
    assert_same(trained, state)
    assert (trained.step, trained.seed) == (5, 5)
    session = onnxruntime.InferenceSession(tmp_path / "inference.onnx")
    values = {n: torch.from_numpy(i.data) for n, i in (*state.parameters, *state.buffers)}
    x, _ = batch(3, 9)
    hidden = torch.relu(torch.from_numpy(x) @ values["fc1.weight"] - values["norm.mean"])
    expected = hidden * values["scale"] @ values["fc2.weight"] + values["fc2.bias"]
    np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, rtol=1e-4, atol=1e-6)


def test_public_names_are_found() -> None:
    assert dir(ondevice) == ondevice.__all__
    for name in ondevice.__all__:
        assert getattr(ondevice, name).__name__ == name
    assert not hasattr(ondevice, "Nothing")

"""On a CUDA device: the same training, and a state that comes back from there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnxruntime import OrtValue

from ortrain.errors import ExecutionError
from ortrain.ondevice import CheckpointState, Module, Optimizer, TrainStep
from tests.ondevice.artifacts import batch
from tests.ondevice.eager import fused, load, values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        "CUDAExecutionProvider" not in onnxruntime.get_available_providers(),
        reason="onnxruntime has no CUDAExecutionProvider",
    ),
]


def _assert_close(one: CheckpointState, other: CheckpointState) -> None:
    others = values(other)
    for name, value in values(one).items():
        np.testing.assert_allclose(value, others[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_accumulating_and_updating_is_what_the_cpu_does(adamw: Path, tmp_path: Path) -> None:
    expected, on_cpu, cpu_optimizer = load(adamw)
    state = CheckpointState.load_checkpoint(adamw / "checkpoint")
    module = Module(adamw / "training_model.onnx", state, adamw / "eval_model.onnx", "cuda:0")
    optimizer = Optimizer(adamw / "optimizer_model.onnx", module)
    for one, update in ((on_cpu, cpu_optimizer), (module, optimizer)):
        for number in range(4):
            one(*batch(6, 2 * number))
            one(*batch(6, 2 * number + 1))
            update.step()
            one.lazy_reset_grad()
    _assert_close(state, expected)
    np.testing.assert_allclose(
        module.eval()(*batch(5))[1], on_cpu.eval()(*batch(5))[1], rtol=1e-4, atol=1e-5
    )
    CheckpointState.save_checkpoint(state, tmp_path / "saved", include_optimizer_state=True)
    _assert_close(CheckpointState.load_checkpoint(tmp_path / "saved"), expected)


def test_a_device_that_is_not_there_is_told(adamw: Path) -> None:
    state = CheckpointState.load_checkpoint(adamw / "checkpoint")
    with pytest.raises(ExecutionError, match=r"'cuda:99'\n.*device"):
        TrainStep(adamw / "train_step_model.onnx", state, device="cuda:99")
    assert fused(adamw)[1](*batch(6)), "the CPU still trains"


def test_the_fused_step_is_what_the_cpu_does(adamw: Path) -> None:
    expected, on_cpu = fused(adamw)
    state = CheckpointState.load_checkpoint(adamw / "checkpoint")
    step = TrainStep(adamw / "train_step_model.onnx", state, device="cuda")
    for number in range(4):
        on_cpu(*batch(6, number))
        step(*batch(6, number))
    _assert_close(state, expected)
    results = step(*(OrtValue.ortvalue_from_numpy(v, "cuda", 0) for v in batch(6)))
    assert all(result.device_name() == "cuda" for result in results)

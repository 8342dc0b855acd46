"""Adapters beside the weights of a model: trained alone, exported, merged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from ortrain.errors import StateError
from ortrain.ondevice import (
    CheckpointState,
    LoRA,
    LossType,
    Module,
    TrainStep,
    export_adapter,
    generate_artifacts,
)
from ortrain.ondevice.optim import AdamW
from tests.ondevice.making.test_artifacts import exported, mlp


@pytest.fixture(params=["module", "file"])
def trained(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Module]:
    """An MLP with adapters after five steps; its folder has the base as it was as `model.onnx`."""
    module, x = mlp(), torch.randn(6, 10)
    file = exported(module, x, tmp_path / "model.onnx")
    generate_artifacts(
        file if request.param == "file" else module,
        loss=LossType.CrossEntropyLoss,
        optimizer=AdamW(),
        lora=LoRA(rank=3, targets=["*.weight"], alpha=6),
        example_inputs=None if request.param == "file" else (x,),
        artifact_directory=tmp_path,
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    before = {name: parameter.data.copy() for name, parameter in state.parameters}
    step = TrainStep(tmp_path / "train_step_model.onnx", state)
    step.set_learning_rate(0.05)
    for _ in range(5):
        step(np.float32(torch.randn(6, 10)), torch.randint(0, 5, (6,)).numpy())
    for name, parameter in state.parameters:
        assert parameter.requires_grad == ("lora" in name)
        assert (parameter.data == before[name]).all() == (not parameter.requires_grad)
    return tmp_path, Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")


def outputs(path: Path, x: np.ndarray, adapter: Path | None = None) -> np.ndarray:
    session = onnxruntime.InferenceSession(path)
    options = onnxruntime.RunOptions()
    if adapter is not None:
        loaded = onnxruntime.LoraAdapter()
        loaded.Load(str(adapter))
        options.add_active_adapter(loaded)
    result: np.ndarray = session.run(["output"], {"input": x}, options)[0]
    return result


def test_kept_merged_and_active_adapters_agree(trained: tuple[Path, Module]) -> None:
    folder, module = trained
    x = np.random.default_rng(0).normal(size=(4, 10)).astype(np.float32)
    for form in ("kept", "merged", "inputs"):
        module.export_model_for_inferencing(folder / f"{form}.onnx", ["output"], adapters=form)
    export_adapter(module.state, folder / "adapter.onnx_adapter")
    kept, merged = outputs(folder / "kept.onnx", x), outputs(folder / "merged.onnx", x)
    active = outputs(folder / "inputs.onnx", x, folder / "adapter.onnx_adapter")
    np.testing.assert_allclose(merged, kept, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(active, kept, rtol=1e-5, atol=1e-5)
    base = outputs(folder / "inputs.onnx", x)
    np.testing.assert_allclose(base, outputs(folder / "model.onnx", x), rtol=1e-6, atol=1e-6)
    assert np.abs(kept - base).max() > 0.1


def test_a_state_without_adapters_has_none_to_export(tmp_path: Path) -> None:
    generate_artifacts(
        nn.Linear(3, 2),
        loss=LossType.MSELoss,
        example_inputs=(torch.randn(2, 3),),
        artifact_directory=tmp_path,
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    with pytest.raises(StateError, match="the checkpoint has no adapters"):
        export_adapter(state, tmp_path / "adapter")
    with pytest.raises(StateError, match="the checkpoint has no adapters"):
        module.export_model_for_inferencing(tmp_path / "i.onnx", ["output"], adapters="merged")
    with pytest.raises(ValueError, match="adapters='none': expected"):
        module.export_model_for_inferencing(tmp_path / "i.onnx", ["output"], adapters="none")
    assert not (tmp_path / "i.onnx").exists()
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"rank": 0}, "rank=0: expected 1 or more"), ({"targets": []}, "targets is empty")],
)
def test_adapters_that_cannot_be_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoRA(**options)

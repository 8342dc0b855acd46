"""Whole scripts: blocks make artifacts, and a device trains them as PyTorch does."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from ortrain.errors import GraphError, InputError, OrtrainWarning, StateError
from ortrain.ondevice import CheckpointState, Module, Optimizer, TrainStep, contract, onnxblock
from ortrain.ondevice.artifacts import generate_artifacts
from ortrain.ondevice.running.checkpoint_file import read
from tests.ondevice.onnxblock.models import Heads, close, floats
from tests.ondevice.onnxblock.test_training import (
    Training,
    WeightedAverageLoss,
    batch,
    weighted_average,
)

PAGE = Path(__file__).parents[3] / "docs" / "ondevice-onnxblock.md"
RATE, STEPS = 0.02, 12
ALL = [name for name, _ in Heads().named_parameters()]


def trained_by_pytorch(heads: Heads, optimizer: torch.optim.Optimizer, max_norm: float) -> Heads:
    for step in range(STEPS):
        optimizer.zero_grad()
        weighted_average(heads, batch(seed=step)).backward()
        torch.nn.utils.clip_grad_norm_(heads.parameters(), max_norm)
        optimizer.step()
    return heads


def trained_on_device(module: Module, optimizer: Optimizer) -> None:
    optimizer.set_learning_rate(RATE)
    for step in range(STEPS):
        module(*batch(seed=step).values())
        optimizer.step()
        module.lazy_reset_grad()


def artifacts(heads: Heads, optimizer_block: Any, folder: Path) -> None:
    """As scripts put them together."""
    block = Training(WeightedAverageLoss())
    for name in ALL:
        block.requires_grad(name)
    with onnxblock.base(heads.as_onnx()):
        block("output1", "output2")
        training, evaluation = block.to_model_proto()
    with onnxblock.empty_base() as accessor:
        optimizer_block(block.parameters())
        optimizer = optimizer_block.to_model_proto()
        assert accessor.model == optimizer
    onnxblock.save_checkpoint(block.parameters(), folder / "checkpoint")
    onnxblock.save_checkpoint(block.parameters(), folder / "nominal", nominal_checkpoint=True)
    own = read(folder / "checkpoint").texts["model"]
    for model in (training, evaluation, optimizer):
        assert {p.key: p.value for p in model.metadata_props}[contract.MODEL_HASH] == own
    onnx.save(training, folder / "training_model.onnx")
    onnx.save(evaluation, folder / "eval_model.onnx")
    onnx.save(optimizer, folder / "optimizer_model.onnx")


def started(folder: Path) -> tuple[CheckpointState, Module, Optimizer]:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    return state, module, Optimizer(folder / "optimizer_model.onnx", module)


def test_the_page_on_blocks_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "page.py").write_text("\n".join(blocks))
    monkeypatch.chdir(tmp_path)
    runpy.run_path("page.py")
    for folder in (tmp_path, tmp_path / "artifacts"):
        _, module, optimizer = started(folder)
        x, labels = floats(6, 4), np.arange(6) % 3
        losses = []
        for _ in range(20):
            losses.append(float(module(x, labels, floats(6, 2, seed=5))))
            optimizer.step()
            module.lazy_reset_grad()
        assert losses[-1] < losses[0]


def test_a_script_of_blocks_trains_with_adamw_as_pytorch(tmp_path: Path) -> None:
    heads = Heads()
    block = onnxblock.optim.AdamW(
        betas=(0.8, 0.99), weight_decay=0.1, clip_grad=onnxblock.optim.ClipGradNorm(0.5)
    )
    artifacts(heads, block, tmp_path)
    state, module, optimizer = started(tmp_path)
    trained_on_device(module, optimizer)
    original = heads.as_onnx()
    reference = torch.optim.AdamW(heads.parameters(), RATE, (0.8, 0.99), 1e-6, weight_decay=0.1)
    trained_by_pytorch(heads, reference, 0.5)
    for name, parameter in heads.named_parameters():
        close(state.parameters[name].data, parameter.detach())

    # Into the model that it began with, and into one for inference.
    CheckpointState.save_checkpoint(state, tmp_path / "trained", include_optimizer_state=True)
    onnxblock.load_checkpoint_to_model(tmp_path / "trained", original)
    onnx.save(original, tmp_path / "loaded.onnx")
    module.export_model_for_inferencing(tmp_path / "exported.onnx", ["output1", "output2"])
    x = floats(3, 4, seed=9)
    expected = [output.detach() for output in heads(torch.tensor(x))]
    for file in ("loaded.onnx", "exported.onnx"):
        session = onnxruntime.InferenceSession(tmp_path / file)
        for found, wanted in zip(session.run(None, {"input": x}), expected, strict=True):
            close(found, wanted)


def test_a_script_of_blocks_trains_with_sgd_as_pytorch(tmp_path: Path) -> None:
    heads = Heads()
    artifacts(heads, onnxblock.optim.SGD(), tmp_path)
    model = onnx.load(tmp_path / "optimizer_model.onnx")
    # Nothing that is not read.
    assert [value.name for value in model.graph.input] == [
        "learning_rate",
        "step",
        *ALL,
        *(f"{name}_grad" for name in ALL),
    ]
    state, module, optimizer = started(tmp_path)
    trained_on_device(module, optimizer)
    trained_by_pytorch(heads, torch.optim.SGD(heads.parameters(), RATE), float("inf"))
    for name, parameter in heads.named_parameters():
        close(state.parameters[name].data, parameter.detach())


def test_an_output_that_the_loss_does_not_need_can_still_be_exported(tmp_path: Path) -> None:
    heads, block = Heads(), Training(onnxblock.loss.MSELoss())
    for name in ALL:
        block.requires_grad(name, name == "a.weight")
    with onnxblock.base(heads.as_onnx()):
        block("output1")
    for name, model in zip(("training", "eval"), block.to_model_proto(), strict=True):
        onnx.save(model, tmp_path / f"{name}.onnx")
    onnxblock.save_checkpoint(block.parameters(), tmp_path / "checkpoint")
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training.onnx", state, tmp_path / "eval.onnx")
    module.export_model_for_inferencing(tmp_path / "exported.onnx", ["output2"])
    (found,) = onnxruntime.InferenceSession(tmp_path / "exported.onnx").run(
        None, {"input": floats(3, 4)}
    )
    close(found, heads(torch.tensor(floats(3, 4)))[1].detach())


def test_artifacts_take_a_block_as_loss_and_one_as_optimizer(tmp_path: Path) -> None:
    heads = Heads()
    generate_artifacts(
        heads.as_onnx(),
        requires_grad=ALL,
        loss=WeightedAverageLoss(),
        optimizer=onnxblock.optim.AdamW(clip_grad=onnxblock.optim.ClipGradNorm(0.5)),
        artifact_directory=tmp_path,
    )
    state, module, optimizer = started(tmp_path)
    trained_on_device(module, optimizer)
    fused = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    step = TrainStep(tmp_path / "train_step_model.onnx", fused)
    step.set_learning_rate(RATE)
    for i in range(STEPS):
        step(*batch(seed=i).values())
    reference = torch.optim.AdamW(heads.parameters(), RATE, eps=1e-6, weight_decay=0.0)
    trained_by_pytorch(heads, reference, 0.5)
    for name, parameter in heads.named_parameters():
        close(state.parameters[name].data, parameter.detach())
        close(fused.parameters[name].data, parameter.detach())


def test_a_nominal_checkpoint_has_no_values_until_they_are_given(tmp_path: Path) -> None:
    heads = Heads()
    artifacts(heads, onnxblock.optim.AdamW(), tmp_path)
    nominal = read(tmp_path / "nominal")
    assert nominal.texts == read(tmp_path / "checkpoint").texts
    assert not nominal.tensors
    assert [spec.name for spec in nominal.states[:2]] == [
        f"{ALL[0]}.exp_avg",
        f"{ALL[0]}.exp_avg_sq",
    ]
    with pytest.raises(InputError, match="has no parameters"):
        onnxblock.load_checkpoint_to_model(tmp_path / "nominal", heads.as_onnx())


def test_a_checkpoint_takes_any_pair_of_lists_of_tensors(tmp_path: Path) -> None:
    trained, frozen = (numpy_helper.from_array(floats(2, 2), name) for name in ("a", "b"))
    onnxblock.save_checkpoint(([trained], [frozen]), tmp_path / "checkpoint")
    content = read(tmp_path / "checkpoint")
    assert [(s.name, s.requires_grad) for s in content.parameters] == [("a", True), ("b", False)]
    np.testing.assert_array_equal(content.tensors["b"], floats(2, 2))


def test_lists_that_were_taken_apart_still_know_statistics_and_states(tmp_path: Path) -> None:
    block, optimizer = Training(WeightedAverageLoss()), onnxblock.optim.AdamW()
    block.requires_grad(ALL[0])
    with onnxblock.base(Heads().as_onnx()):
        block("output1", "output2")
    trained, frozen = block.parameters()
    with onnxblock.empty_base():
        optimizer((trained, frozen))
    onnxblock.save_checkpoint(block.parameters(), tmp_path / "whole")
    onnxblock.save_checkpoint((trained, frozen), tmp_path / "apart")
    whole, apart = read(tmp_path / "whole"), read(tmp_path / "apart")
    assert apart.states == whole.states
    assert [state.name for state in apart.states] == [f"{ALL[0]}.exp_avg", f"{ALL[0]}.exp_avg_sq"]
    # Lists of two blocks, and copies, are lists of tensors and no more.
    for pair in ((list(trained), frozen), ([*trained], [*frozen])):
        onnxblock.save_checkpoint(pair, tmp_path / "copied")
        assert not read(tmp_path / "copied").states


def test_tensors_that_a_model_lacks_are_left_out_with_a_warning(tmp_path: Path) -> None:
    heads = Heads()
    artifacts(heads, onnxblock.optim.SGD(), tmp_path)
    model = Heads().as_onnx()
    kept = [t for t in model.graph.initializer if t.name != "b.bias"]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    with pytest.warns(OrtrainWarning, match=r"no initializer b\.bias: left out"):
        onnxblock.load_checkpoint_to_model(tmp_path / "checkpoint", model)
    np.testing.assert_array_equal(
        numpy_helper.to_array(model.graph.initializer[0]), heads.body.weight.detach()
    )


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    artifacts(Heads(), onnxblock.optim.SGD(), tmp_path)
    model = Heads().as_onnx()
    model.graph.initializer[-1].CopyFrom(numpy_helper.from_array(floats(7), "b.bias"))
    before = model.SerializeToString()
    with pytest.raises(GraphError, match=r"'b\.bias' is float32 \[2\] in .* float32 \[7\]"):
        onnxblock.load_checkpoint_to_model(tmp_path / "checkpoint", model)
    assert model.SerializeToString() == before
    del model.graph.initializer[:]
    with pytest.raises(GraphError, match="no initializer of the checkpoint"):
        onnxblock.load_checkpoint_to_model(tmp_path / "checkpoint", model)


def test_an_optimizer_on_another_model_is_refused() -> None:
    parameters = ([numpy_helper.from_array(floats(2), "a")], [])
    with onnxblock.empty_base() as accessor:
        value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
        accessor.model.graph.input.append(value)
        with pytest.raises(StateError, match="SGD was called on a base that is not empty"):
            onnxblock.optim.SGD()(parameters)


def test_clipping_by_anything_else_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a ClipGradNorm"):
        onnxblock.optim.AdamW(clip_grad=1.0)  # type: ignore[arg-type]


def test_a_block_that_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="expected an OptimType or an optimizer"):
        generate_artifacts(
            Heads().as_onnx(), ALL, loss=WeightedAverageLoss(), optimizer=onnxblock.blocks.Neg()
        )

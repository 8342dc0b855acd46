"""``Module``: which models and checkpoints belong together, and parameters as one buffer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnxruntime import OrtValue
from safetensors.numpy import save

from ortrain.errors import ExecutionError, InputError, StateError
from ortrain.ondevice import CheckpointState, Module, Optimizer, TrainStep
from ortrain.ondevice.running.tensor import Device
from tests.files import sealing
from tests.ondevice import artifacts
from tests.ondevice.eager import assert_same, fused, load

# -- what belongs together -----------------------------------------------------------------------


def _changed(adamw: Path, replaced: tuple[str, str], shapes: dict[str, int] | None = None) -> bytes:
    """The checkpoint with another text in its lists, and one dimension of some tensors changed."""
    metadata = {key: text.replace(*replaced) for key, text in artifacts.description().items()}
    tensors = {name.replace(*replaced): array for name, array in artifacts.initial().items()}
    for name, size in (shapes or {}).items():
        tensors[name] = np.zeros((size, *tensors[name].shape[1:]), np.float32)
    from ortrain.ondevice.running.checkpoint_file import model_hash

    metadata["model"] = model_hash(metadata["parameters"], metadata["buffers"])
    return sealing.sealed(save(tensors, metadata))


def test_a_checkpoint_of_other_names_is_refused(adamw: Path) -> None:
    state = CheckpointState.load_checkpoint(_changed(adamw, ("fc1", "first")))
    with pytest.raises(InputError, match="does not belong to this checkpoint") as caught:
        Module(adamw / "training_model.onnx", state)
    text = str(caught.value)
    assert f"training model {adamw / 'training_model.onnx'}" in text
    assert "the model lacks first.weight_grad.accumulation.buffer" in text
    assert "the checkpoint lacks fc1.weight_grad.accumulation.buffer" in text
    with pytest.raises(InputError, match=r"the checkpoint lacks fc1\.weight"):
        TrainStep(adamw / "train_step_model.onnx", state)


def test_a_checkpoint_of_other_sizes_is_refused(adamw: Path) -> None:
    uri = _changed(adamw, ("[8, 3]", "[9, 3]"), {"fc2.weight": 9})
    state = CheckpointState.load_checkpoint(uri)
    message = r"fc2\.weight is float32 \[8, 3\] in the model and float32 \[9, 3\] in the checkpoint"
    with pytest.raises(InputError, match=message):
        Module(adamw / "training_model.onnx", state)
    with pytest.raises(InputError, match=message):
        TrainStep(adamw / "train_step_model.onnx", state)
    assert not state.gradients


def test_a_checkpoint_that_freezes_what_the_model_trains_is_refused(adamw: Path) -> None:
    changed = ('"shape": [3], "requires_grad": true', '"shape": [3], "requires_grad": false')
    state = CheckpointState.load_checkpoint(_changed(adamw, changed))
    with pytest.raises(InputError, match=r"the checkpoint lacks fc2\.bias_grad"):
        Module(adamw / "training_model.onnx", state)


def test_an_optimizer_of_another_kind_is_refused(adamw: Path, sgd: Path) -> None:
    _, module, _ = load(adamw)
    with pytest.raises(InputError, match=r"the model lacks fc1\.weight\.exp_avg.* and 9 more"):
        Optimizer(sgd / "optimizer_model.onnx", module)
    state, module, _ = load(sgd)
    with pytest.raises(InputError, match=r"the checkpoint lacks fc1\.weight\.exp_avg"):
        Optimizer(adamw / "optimizer_model.onnx", module)
    with pytest.raises(InputError, match=r"the checkpoint lacks fc1\.weight\.exp_avg"):
        TrainStep(adamw / "train_step_model.onnx", state)


@pytest.mark.parametrize(
    "name", ["training_model", "eval_model", "optimizer_model", "train_step_model"]
)
def test_each_model_is_taken_for_what_it_is_alone(sgd: Path, name: str) -> None:
    state, module, _ = load(sgd)
    file = sgd / f"{name}.onnx"
    training = sgd / "training_model.onnx"
    message = "does not belong to this checkpoint"
    if name != "training_model":
        with pytest.raises(InputError, match=message):
            Module(file, state)
    if name != "eval_model":
        with pytest.raises(InputError, match=message):
            Module(training, state, file)
    if name != "optimizer_model":
        with pytest.raises(InputError, match=message):
            Optimizer(file, module)
    if name != "train_step_model":
        with pytest.raises(InputError, match=message):
            TrainStep(file, state)


def test_a_file_that_is_no_model_is_told(adamw: Path, tmp_path: Path) -> None:
    state = CheckpointState.load_checkpoint(adamw / "checkpoint")
    with pytest.raises(InputError, match=r"cannot load the training model .*checkpoint\n"):
        Module(adamw / "checkpoint", state)
    with pytest.raises(InputError, match=r"cannot load the training model .*none\n"):
        Module(tmp_path / "none", state)
    with pytest.raises(InputError, match=r"cannot load the evaluation model \(3 bytes\)"):
        Module(adamw / "training_model.onnx", state, b"abc")


def test_a_device_that_is_not_there_is_told(adamw: Path) -> None:
    state = CheckpointState.load_checkpoint(adamw / "checkpoint")
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        with pytest.raises(ExecutionError, match=r"'cuda:0'\n.*but .*CPUExecutionProvider"):
            Module(adamw / "training_model.onnx", state, device="cuda:0")
    for name in ("tpu", "cuda:x", ""):
        with pytest.raises(ValueError, match=f"no device is called '{name}'"):
            TrainStep(adamw / "train_step_model.onnx", state, device=name)


def test_a_provider_without_its_device_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that has onnxruntime-gpu and no GPU: nothing can be allocated there."""
    names = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: names)

    def fail(*_: object) -> None:
        raise RuntimeError("cuda_call.cc:1 F() CUDA failure 100: no device ; GPU=-1 ; line=7")

    monkeypatch.setattr(onnxruntime.OrtValue, "ortvalue_from_shape_and_type", fail)
    with pytest.raises(ExecutionError, match=r"'cuda:1'\n.*: CUDA failure 100: no device\n"):
        Device.parse("cuda:1")


def test_a_session_without_the_provider_of_its_device_is_told() -> None:
    device = Device("cuda", 1)
    device.check_runs(["CUDAExecutionProvider", "CPUExecutionProvider"])
    with pytest.raises(ExecutionError, match=r"'cuda:1'\n.*could not load its CUDAExec"):
        device.check_runs(["CPUExecutionProvider"])


def test_a_state_is_trained_on_one_device_alone(adamw: Path) -> None:
    state, _, _ = load(adamw)
    with pytest.raises(StateError, match="trained on cpu, and cannot be on cuda:1 too"):
        state.place(Device("cuda", 1))
    assert state.device == Device("cpu")


def test_without_an_evaluation_model_there_is_no_evaluation(adamw: Path, tmp_path: Path) -> None:
    state = CheckpointState.load_checkpoint(adamw / "checkpoint")
    module = Module(adamw / "training_model.onnx", state)
    for call in (
        module.eval,
        lambda: module.train(False),
        lambda: module.export_model_for_inferencing(tmp_path / "x.onnx", ["logits"]),
    ):
        with pytest.raises(StateError, match="made without an evaluation model"):
            call()
    assert module.training


def test_the_users_session_options_are_taken(adamw: Path, tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    state = CheckpointState.load_checkpoint(adamw / "checkpoint")
    Module(adamw / "training_model.onnx", state, session_options=options)
    assert (tmp_path / "optimized.onnx").exists()


# -- one buffer ----------------------------------------------------------------------------------


def test_parameters_go_out_and_in_as_one_buffer(adamw: Path) -> None:
    state, module, _ = load(adamw)
    other_state, other, _ = load(adamw)
    assert module.get_parameters_size() == 4 * 8 + 8 * 3 + 3
    assert module.get_parameters_size(trainable_only=False) == 4 * 8 + 8 + 8 * 3 + 3
    for trainable_only in (True, False):
        buffer = module.get_contiguous_parameters(trainable_only)
        assert isinstance(buffer, OrtValue)
        expected = [p.data.reshape(-1) for _, p in state.parameters]
        if trainable_only:
            del expected[1]
        np.testing.assert_array_equal(buffer.numpy(), np.concatenate(expected))
        changed = OrtValue.ortvalue_from_numpy(buffer.numpy() * 2)
        other.copy_buffer_to_parameters(changed, trainable_only)
        for name, parameter in state.parameters:
            factor = 1 if name == "scale" and trainable_only else 2
            np.testing.assert_array_equal(
                other_state.parameters[name].data, parameter.data * factor
            )


def test_the_buffer_is_a_copy(adamw: Path) -> None:
    state, module, _ = load(adamw)
    module.get_contiguous_parameters().numpy()[:] = 0
    assert state.parameters["scale"].data.all()


@pytest.mark.parametrize(
    ("buffer", "error", "message"),
    [
        (OrtValue.ortvalue_from_numpy(np.zeros(58, np.float32)), ValueError, r"float32 \[59\]"),
        (OrtValue.ortvalue_from_numpy(np.zeros((59, 1), np.float32)), ValueError, r"\[59, 1\]"),
        (OrtValue.ortvalue_from_numpy(np.zeros(59)), TypeError, r"given float64 \[59\]"),
        (np.zeros(59, np.float32), TypeError, "given a ndarray; give an OrtValue"),
    ],
)
def test_a_wrong_buffer_changes_nothing(
    adamw: Path, buffer: OrtValue, error: type[Exception], message: str
) -> None:
    state, module, _ = load(adamw)
    with pytest.raises(error, match=message):
        module.copy_buffer_to_parameters(buffer)
    assert_same(state, CheckpointState.load_checkpoint(adamw / "checkpoint"))


# -- nominal -------------------------------------------------------------------------------------


def test_a_nominal_checkpoint_trains_once_it_is_completed(adamw: Path) -> None:
    state, module, optimizer = load(adamw, "nominal_checkpoint")
    refusal = (
        r"Cannot perform TrainStep with a nominal state\. Please load the model parameters "
        r"first\.\n.*no values for fc1\.weight, scale, fc2\.weight and 2 more\n"
        r".*copy_buffer_to_parameters"
    )
    with pytest.raises(StateError, match=refusal):
        module(*artifacts.batch(4))
    with pytest.raises(StateError, match="Cannot perform EvalStep with a nominal state"):
        module.eval()(*artifacts.batch(4))
    with pytest.raises(StateError, match="Cannot perform a copy of the parameters"):
        module.get_contiguous_parameters()
    _, whole, other = load(adamw)
    module.train().copy_buffer_to_parameters(whole.get_contiguous_parameters(True), True)
    with pytest.raises(StateError, match=r"no values for scale, norm\.mean"):
        module(*artifacts.batch(4))
    module.copy_buffer_to_parameters(whole.get_contiguous_parameters(), False)
    with pytest.raises(StateError, match=r"no values for norm\.mean"):
        module(*artifacts.batch(4))
    state.buffers["norm.mean"] = np.zeros(8, np.float32)
    for one, update in ((module, optimizer), (whole, other)):
        one(*artifacts.batch(4))
        update.step()
    assert_same(state, whole.state)


def test_a_nominal_checkpoint_is_refused_by_the_fused_step(adamw: Path) -> None:
    state = CheckpointState.load_checkpoint(adamw / "nominal_checkpoint")
    step = TrainStep(adamw / "train_step_model.onnx", state)
    with pytest.raises(StateError, match="Cannot perform TrainStep with a nominal state"):
        step(*artifacts.batch(4))
    assert (state.step, state.seed) == (0, 0)


# -- learning rate -------------------------------------------------------------------------------


def test_the_learning_rate_is_shared_by_all_that_update_a_state(adamw: Path) -> None:
    state, _, optimizer = load(adamw)
    assert optimizer.get_learning_rate() == 0.001
    optimizer.set_learning_rate(0.5)
    assert TrainStep(adamw / "train_step_model.onnx", state).get_learning_rate() == 0.5


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_learning_rate_that_is_no_number_is_refused(adamw: Path, value: float) -> None:
    _, step = fused(adamw)
    with pytest.raises(ValueError, match="a learning rate is a finite number"):
        step.set_learning_rate(value)
    assert step.get_learning_rate() == 0.001

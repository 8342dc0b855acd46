"""Training by artifacts: what PyTorch does, in place, and the same when resumed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnxruntime import OrtValue

from ortrain.errors import ExecutionError, StateError
from ortrain.ondevice import CheckpointState, Module, Optimizer, TrainStep
from tests.ondevice.artifacts import TRAINED, batch, initial
from tests.ondevice.eager import Eager, assert_close, assert_same, fused, load, values

KINDS = ("adamw", "sgd")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def folder(kind: str, request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(kind)


# -- as PyTorch ----------------------------------------------------------------------------------


def test_accumulating_and_updating_is_what_torch_does(folder: Path, kind: str) -> None:
    state, module, optimizer = load(folder)
    eager = Eager(kind)
    optimizer.set_learning_rate(0.01)
    for update in range(5):
        for part in range(2):
            loss, logits = module(*batch(6, 2 * update + part))
            expected, expected_logits = eager(*batch(6, 2 * update + part))
            np.testing.assert_allclose(loss, expected.item(), rtol=2e-5)
            np.testing.assert_allclose(logits, expected_logits.detach(), rtol=2e-4, atol=2e-5)
        for name in TRAINED:
            gradient = eager.values[name].grad
            assert gradient is not None
            np.testing.assert_allclose(
                state.parameters[name].grad, gradient, rtol=2e-4, atol=2e-6, err_msg=name
            )
        optimizer.step()
        norm = eager.update()
        if kind == "adamw":
            assert optimizer.grad_norm == pytest.approx(norm, rel=1e-5)
        else:
            assert optimizer.grad_norm is None
        module.lazy_reset_grad()
        eager.optimizer.zero_grad()
        assert_close(state, eager)
    assert (state.step, state.seed) == (5, 10)


def test_the_fused_step_is_what_torch_does(folder: Path, kind: str) -> None:
    state, step = fused(folder)
    eager = Eager(kind)
    step.set_learning_rate(0.01)
    assert step.grad_norm is None
    for number in range(5):
        loss, _ = step(*batch(6, number))
        eager.optimizer.zero_grad()
        expected, _ = eager(*batch(6, number))
        norm = eager.update()
        np.testing.assert_allclose(loss, expected.item(), rtol=2e-5)
        if kind == "adamw":
            assert step.grad_norm == pytest.approx(norm, rel=1e-5)
        assert_close(state, eager)
    assert (state.step, state.seed) == (5, 5)


def test_evaluation_is_what_torch_does_and_changes_nothing(adamw: Path) -> None:
    state, module, _ = load(adamw)
    module(*batch(6))
    before, gradient = values(state), state.parameters["fc2.bias"].grad.copy()
    eager = Eager()
    eager(*batch(6))
    assert module.eval() is module
    assert not module.training
    loss, logits = module(*batch(4, 1))
    expected, expected_logits = eager(*batch(4, 1), training=False)
    np.testing.assert_allclose(loss, expected.item(), rtol=2e-5)
    np.testing.assert_allclose(logits, expected_logits.detach(), rtol=2e-4, atol=2e-5)
    assert all((before[name] == value).all() for name, value in values(state).items())
    np.testing.assert_array_equal(state.parameters["fc2.bias"].grad, gradient)
    assert state.seed == 1
    assert module.train().training


# -- inputs and results --------------------------------------------------------------------------


def test_names_are_the_users_alone(adamw: Path) -> None:
    _, module, _ = load(adamw)
    _, step = fused(adamw)
    for subject in (module, step, module.eval()):
        assert subject.input_names() == ["x", "labels"]
        assert subject.output_names() == ["loss", "logits"]


def test_results_are_arrays_and_ortvalues_where_all_inputs_are(adamw: Path) -> None:
    _, module, _ = load(adamw)
    _, step = fused(adamw)
    x, labels = batch(5)
    for subject in (module, step, module.eval()):
        loss, logits = subject(x, labels)
        assert isinstance(loss, np.ndarray)
        assert (loss.dtype, loss.shape, logits.shape) == (np.float32, (), (5, 3))
        mixed, _ = subject(OrtValue.ortvalue_from_numpy(x), labels)
        assert isinstance(mixed, np.ndarray)
        results = subject(*(OrtValue.ortvalue_from_numpy(v) for v in (x, labels)))
        assert all(isinstance(value, OrtValue) for value in results)
        assert results[1].shape() == [5, 3]


def test_results_outlive_the_next_call(adamw: Path) -> None:
    _, module, _ = load(adamw)
    x, labels = batch(5)
    array = module.eval()(x, labels)[1]
    value = module(*(OrtValue.ortvalue_from_numpy(v) for v in (x, labels)))[1]
    kept = array.copy()
    module(*batch(5, 1))
    module(*(OrtValue.ortvalue_from_numpy(v) for v in batch(5, 2)))
    np.testing.assert_array_equal(array, kept)
    np.testing.assert_array_equal(value.numpy(), kept)


def test_arrays_of_any_layout_are_taken(adamw: Path) -> None:
    _, module, _ = load(adamw)
    x, labels = batch(6)
    expected = module.eval()(x, labels)[1]
    doubled = np.repeat(labels, 2)
    doubled.flags.writeable = False
    np.testing.assert_array_equal(module(np.asfortranarray(x), doubled[::2])[1], expected)


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ((batch(6)[0],), TypeError, r"takes 2 inputs \(x: float32 \[batch, 4\], labels: int64 "),
        ((*batch(6), batch(6)[0]), TypeError, "and was given 3"),
        (
            (batch(6)[0].astype(np.float64), batch(6)[1]),
            TypeError,
            r"'x' of the .* is float32 \[batch, 4\], and was given float64 \[6, 4\]",
        ),
        ((batch(6)[0][:, :3], batch(6)[1]), ValueError, r"\[batch, 4\], and was given .*\[6, 3\]"),
        ((batch(6)[0], batch(6)[1][:, None]), ValueError, r"'labels' .* given int64 \[6, 1\]"),
        ((batch(6)[0], batch(5)[1]), ValueError, r"given int64 \[5\]; batch is 6 in 'x'"),
        ((batch(6)[0].tolist(), batch(6)[1]), TypeError, "given a list; give a numpy array or an"),
        (
            (OrtValue.ortvalue_from_numpy(batch(6)[0].astype(np.float16)), batch(6)[1]),
            TypeError,
            "given float16",
        ),
    ],
)
def test_a_wrong_input_is_told_before_anything_changes(
    adamw: Path, inputs: tuple[object, ...], error: type[Exception], message: str
) -> None:
    state, module, _ = load(adamw)
    other, step = fused(adamw)
    for subject in (module, step):
        with pytest.raises(error, match=message):
            subject(*inputs)
    for untouched in (state, other):
        assert not untouched.has_gradients
        assert (untouched.seed, untouched.step) == (0, 0)
        assert all((value == initial()[name]).all() for name, value in values(untouched).items())


def test_another_batch_size_may_follow(adamw: Path) -> None:
    _, module, _ = load(adamw)
    for size in (4, 7, 1):
        assert module(*batch(size))[1].shape == (size, 3)


def test_a_run_that_fails_leaves_the_state(adamw: Path) -> None:
    state, module, _ = load(adamw)
    x, labels = batch(4)
    with pytest.raises(ExecutionError, match=r"the training model .* failed"):
        module(x, labels + 5)
    assert (state.seed, state.has_gradients) == (0, False)
    assert all((value == initial()[name]).all() for name, value in values(state).items())
    module(x, labels)
    assert state.seed == 1


# -- gradients -----------------------------------------------------------------------------------


def test_gradients_accumulate_until_they_are_reset(adamw: Path) -> None:
    state, module, _ = load(adamw)
    bias = state.parameters["fc2.bias"]
    np.testing.assert_array_equal(bias.grad, np.zeros_like(bias.data))
    state.seed = 0
    module(*batch(4))
    once = bias.grad.copy()
    state.seed = 0
    module(*batch(4))
    np.testing.assert_allclose(bias.grad, 2 * once, rtol=1e-6)
    module.lazy_reset_grad()
    np.testing.assert_array_equal(bias.grad, np.zeros_like(bias.data))
    state.seed = 0
    module(*batch(4))
    np.testing.assert_array_equal(bias.grad, once)
    assert state.parameters["scale"].grad is None


def test_what_was_in_the_gradients_is_not_read_after_a_reset(adamw: Path) -> None:
    state, module, _ = load(adamw)
    module(*batch(4))
    state.parameters["fc2.bias"].grad[:] = np.nan
    module.lazy_reset_grad()
    module(*batch(4))
    assert np.isfinite(state.parameters["fc2.bias"].grad).all()


def test_an_update_without_gradients_is_refused(adamw: Path) -> None:
    _, module, optimizer = load(adamw)
    with pytest.raises(StateError, match="no gradients"):
        optimizer.step()
    module(*batch(4))
    optimizer.step()
    module.lazy_reset_grad()
    with pytest.raises(StateError, match="no gradients"):
        optimizer.step()


# -- memory --------------------------------------------------------------------------------------


def test_training_writes_into_the_arrays_of_the_state(adamw: Path) -> None:
    state, module, optimizer = load(adamw)
    arrays = {name: item.data for name, item in (*state.parameters, *state.buffers)}
    before = values(state)
    module(*batch(4))
    optimizer.step()
    changed = {name for name, array in arrays.items() if (array != before[name]).any()}
    assert changed == {*TRAINED, "norm.mean"}
    assert all(state.parameters[name].data is arrays[name] for name in TRAINED)


def test_what_is_written_into_a_parameter_is_trained_on(adamw: Path) -> None:
    state, module, _ = load(adamw)
    state.parameters["fc2.weight"].data[:] = 0
    state.parameters["fc2.bias"] = np.float32([1, 2, 3])
    np.testing.assert_array_equal(module.eval()(*batch(2))[1], [[1, 2, 3]] * 2)


def test_modules_may_share_a_state(adamw: Path) -> None:
    state, module, optimizer = load(adamw)
    other = Module(adamw / "training_model.onnx", state, adamw / "eval_model.onnx")
    step = TrainStep(adamw / "train_step_model.onnx", state)
    module(*batch(4))
    optimizer.step()
    step(*batch(4, 1))
    assert state.step == 2
    np.testing.assert_array_equal(module.eval()(*batch(4, 2))[1], other.eval()(*batch(4, 2))[1])


# -- resuming ------------------------------------------------------------------------------------


def _train(module: Module, optimizer: Optimizer, numbers: range) -> None:
    for number in numbers:
        module(*batch(5, number))
        optimizer.step()
        module.lazy_reset_grad()


def test_a_resumed_training_is_the_same_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    straight, module, optimizer = load(folder)
    optimizer.set_learning_rate(0.03)
    _train(module, optimizer, range(6))
    state, module, optimizer = load(folder)
    optimizer.set_learning_rate(0.03)
    _train(module, optimizer, range(3))
    CheckpointState.save_checkpoint(state, tmp_path / "saved", include_optimizer_state=True)
    for uri in (tmp_path / "saved", (tmp_path / "saved").read_bytes()):
        resumed = CheckpointState.load_checkpoint(uri)
        module = Module(folder / "training_model.onnx", resumed)
        optimizer = Optimizer(folder / "optimizer_model.onnx", module)
        assert optimizer.get_learning_rate() == 0.03
        assert (resumed.step, resumed.seed) == (3, 3)
        _train(module, optimizer, range(3, 6))
        assert_same(resumed, straight)


def test_the_fused_step_resumes_bit_for_bit_too(folder: Path, tmp_path: Path) -> None:
    straight, step = fused(folder)
    for number in range(6):
        step(*batch(5, number))
    state, step = fused(folder)
    for number in range(3):
        step(*batch(5, number))
    CheckpointState.save_checkpoint(state, tmp_path / "saved", include_optimizer_state=True)
    resumed = CheckpointState.load_checkpoint(tmp_path / "saved")
    step = TrainStep(folder / "train_step_model.onnx", resumed)
    for number in range(3, 6):
        step(*batch(5, number))
    assert_same(resumed, straight)


def test_without_the_optimizer_state_it_starts_at_zero(adamw: Path, tmp_path: Path) -> None:
    state, module, optimizer = load(adamw)
    optimizer.set_learning_rate(0.03)
    _train(module, optimizer, range(3))
    CheckpointState.save_checkpoint(state, tmp_path / "saved")
    resumed, _, optimizer = load_from(adamw, tmp_path / "saved")
    assert_same(resumed, state)
    assert (resumed.step, resumed.seed, optimizer.get_learning_rate()) == (0, 0, 0.001)
    assert not any(tensor.numpy().any() for tensor in resumed.optimizer_states.values())


def load_from(folder: Path, checkpoint: Path) -> tuple[CheckpointState, Module, Optimizer]:
    state = CheckpointState.load_checkpoint(checkpoint)
    module = Module(folder / "training_model.onnx", state)
    return state, module, Optimizer(folder / "optimizer_model.onnx", module)


def test_everything_loads_from_bytes(adamw: Path) -> None:
    def content(name: str) -> bytes:
        return (adamw / name).read_bytes()

    state = CheckpointState.load_checkpoint(bytearray(content("checkpoint")))
    module = Module(content("training_model.onnx"), state, memoryview(content("eval_model.onnx")))
    optimizer = Optimizer(content("optimizer_model.onnx"), module)
    _train(module, optimizer, range(2))
    expected, module, optimizer = load(adamw)
    _train(module, optimizer, range(2))
    assert_same(state, expected)

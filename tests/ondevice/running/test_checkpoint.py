"""Checkpoints: what they hold, that a bad one is refused, and that a good one is never lost."""

from __future__ import annotations

import copy
import errno
import io
import json
import math
import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from safetensors.numpy import save as unsealed

from ortrain.errors import InputError, SaveError, StateError
from ortrain.ondevice import CheckpointState, LinearLRScheduler, Parameter, TrainStep
from tests.files import sealing
from tests.ondevice import artifacts
from tests.ondevice.eager import assert_same, load

Tensors = dict[str, np.ndarray]
Metadata = dict[str, str]


@pytest.fixture
def state(adamw: Path) -> CheckpointState:
    return CheckpointState.load_checkpoint(adamw / "checkpoint")


# -- what it holds -------------------------------------------------------------------------------


def test_parameters_are_a_mapping_in_the_models_order(state: CheckpointState) -> None:
    names = [name for name, _ in state.parameters]
    assert names == list(artifacts.SHAPES)
    assert len(state.parameters) == 4
    assert "scale" in state.parameters
    assert "norm.mean" not in state.parameters
    for name, parameter in state.parameters:
        assert isinstance(parameter, Parameter)
        assert state.parameters[name] is parameter
        assert parameter.name == name
        assert parameter.requires_grad == (name != "scale")
        assert parameter.grad is None
        np.testing.assert_array_equal(parameter.data, artifacts.initial()[name])
    with pytest.raises(KeyError, match=r"no parameter 'w'; there are fc1\.weight"):
        state.parameters["w"]


def test_buffers_are_a_mapping_too(state: CheckpointState) -> None:
    assert [name for name, _ in state.buffers] == ["norm.mean"]
    state.buffers["norm.mean"] = np.arange(8, dtype=np.float32)
    np.testing.assert_array_equal(state.buffers["norm.mean"].data, np.arange(8))


def test_all_of_it_can_be_printed(state: CheckpointState) -> None:
    state.properties["epoch"] = 3
    assert "Parameter('fc1.weight', float32 [4, 8], requires_grad=True)" in repr(state.parameters)
    assert repr(state.buffers) == "<buffers: 1\n  Buffer('norm.mean', float32 [8])>"
    assert repr(state.properties) == "Properties({'epoch': 3})"
    assert "<parameters: 4" in repr(state)


@pytest.mark.parametrize("from_bytes", [False, True])
def test_its_memory_can_be_written(adamw: Path, from_bytes: bool) -> None:
    uri = adamw / "checkpoint"
    state = CheckpointState.load_checkpoint(uri.read_bytes() if from_bytes else uri)
    for name, item in (*state.parameters, *state.buffers):
        flags = item.data.flags
        assert flags.writeable, name
        assert flags.aligned, name
        assert flags.c_contiguous, name


def test_setting_copies_into_the_memory(state: CheckpointState) -> None:
    parameter = state.parameters["fc2.bias"]
    memory = parameter.data
    given = np.float32([1, 2, 3])
    parameter.data = given
    given[:] = 0
    assert parameter.data is memory
    np.testing.assert_array_equal(memory, [1, 2, 3])


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (np.zeros(4, np.float32), ValueError, r"fc2\.bias is float32 \[3\], .* float32 \[4\]"),
        (np.zeros((3, 1), np.float32), ValueError, r"given float32 \[3, 1\]"),
        (np.zeros(3), TypeError, r"given float64 \[3\]; .* array\.astype\('float32'\)"),
        ([1.0, 2.0, 3.0], TypeError, "takes a numpy array, and was given a list"),
    ],
)
def test_setting_another_shape_or_dtype_is_refused(
    state: CheckpointState, value: Any, error: type[Exception], message: str
) -> None:
    before = state.parameters["fc2.bias"].data.copy()
    with pytest.raises(error, match=message):
        state.parameters["fc2.bias"] = value
    np.testing.assert_array_equal(state.parameters["fc2.bias"].data, before)


# -- properties ----------------------------------------------------------------------------------


def test_properties_come_back_as_they_were(state: CheckpointState, tmp_path: Path) -> None:
    given = {"epoch": 3, "best": 0.1, "worst": -math.inf, "least": math.inf, "name": "größe"}
    for key, value in given.items():
        state.properties[key] = value
    state.properties["numpy"] = np.float64(2.5)
    CheckpointState.save_checkpoint(state, tmp_path / "saved")
    loaded = CheckpointState.load_checkpoint(tmp_path / "saved").properties
    assert dict(loaded) == {**given, "numpy": 2.5}
    assert [type(value) for _, value in loaded] == [int, float, float, float, str, float]
    assert (len(loaded), "epoch" in loaded, "x" in loaded) == (6, True, False)
    assert loaded["epoch"] == 3


def test_properties_are_json_that_every_language_reads(
    state: CheckpointState, tmp_path: Path
) -> None:
    state.properties["best"] = math.inf
    CheckpointState.save_checkpoint(state, tmp_path / "saved")
    text = _metadata(tmp_path / "saved")["properties"]

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(text, parse_constant=refuse) == {"best": math.inf}


@pytest.mark.parametrize("value", [None, True, [1], np.float32(1), np.zeros(()), b"x"])
def test_a_property_of_another_type_is_refused_by_name(state: CheckpointState, value: Any) -> None:
    with pytest.raises(TypeError, match="the property 'best' takes an int, a float or a str"):
        state.properties["best"] = value
    assert len(state.properties) == 0


def test_a_property_that_is_no_number_is_refused(state: CheckpointState) -> None:
    with pytest.raises(ValueError, match="the property 'best' cannot be nan"):
        state.properties["best"] = math.nan
    with pytest.raises(TypeError, match="the name of a property is a string, not 1"):
        state.properties[1] = 2  # type: ignore[index]
    with pytest.raises(KeyError, match="no property 'best'; there are none"):
        state.properties["best"]


# -- the file ------------------------------------------------------------------------------------


def test_a_saved_checkpoint_is_what_the_contract_says(adamw: Path, tmp_path: Path) -> None:
    state, module, optimizer = load(adamw)
    module(*artifacts.batch(4))
    optimizer.step()
    CheckpointState.save_checkpoint(state, tmp_path / "weights")
    CheckpointState.save_checkpoint(state, tmp_path / "all", include_optimizer_state=True)
    assert {*load_file(tmp_path / "weights")} == {*artifacts.SHAPES, *artifacts.BUFFERS}
    assert {*load_file(tmp_path / "all")} == {
        *artifacts.SHAPES,
        *artifacts.BUFFERS,
        *artifacts.STATES,
    }
    assert _metadata(tmp_path / "weights") == artifacts.description()
    counted = {"step": "1", "seed": "1", "learning_rate": "0.001"}
    assert _metadata(tmp_path / "all") == artifacts.description() | counted
    tensors = load_file(tmp_path / "all")
    np.testing.assert_array_equal(tensors["fc1.weight"], state.parameters["fc1.weight"].data)


def test_tensors_start_at_multiples_of_their_elements(tmp_path: Path) -> None:
    shapes = {"flags": ("BOOL", np.bool_, 3), "half": ("F16", np.float16, 5)}
    shapes |= {"scalar": ("F64", np.float64, ()), "none": ("I64", np.int64, 0)}
    rows = [
        {
            "name": name,
            "dtype": dtype,
            "shape": [size] if size != () else [],
            "requires_grad": False,
        }
        for name, (dtype, _, size) in shapes.items()
    ]
    tensors = {name: np.ones(size, kind) for name, (_, kind, size) in shapes.items()}
    uri = save(tensors, _described(parameters=json.dumps(rows), buffers="[]", states="[]"))
    state = CheckpointState.load_checkpoint(uri)
    CheckpointState.save_checkpoint(state, tmp_path / "saved")
    content = (tmp_path / "saved").read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    header = json.loads(content[8 : 8 + length])
    for name, array in tensors.items():
        assert header[name]["data_offsets"][0] % array.itemsize == 0
        loaded = CheckpointState.load_checkpoint(tmp_path / "saved").parameters[name].data
        assert (loaded.dtype, loaded.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(loaded, array)


def test_a_symbolic_link_stays_one(state: CheckpointState, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    CheckpointState.save_checkpoint(state, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert_same(CheckpointState.load_checkpoint(tmp_path / "file"), state)


def test_only_a_state_can_be_saved(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="must be a CheckpointState, not a dict"):
        CheckpointState.save_checkpoint({}, tmp_path / "saved")  # type: ignore[arg-type]


def _metadata(file: Path) -> dict[str, str]:
    content = file.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    metadata: dict[str, str] = header["__metadata__"]
    return metadata | {"checksum": sealing.UNSEALED}


# -- failures while saving -----------------------------------------------------------------------


class FullDisk(io.FileIO):
    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(params=["write", "fsync", "rename"])
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Breaks one step of saving."""
    failure = OSError(errno.ENOSPC, "No space left on device")

    def fail(*_: Any, **__: Any) -> Any:
        raise failure

    if request.param == "write":
        opened = Path.open

        def unwritable(self: Path, mode: str = "r", *args: Any, **more: Any) -> Any:
            return FullDisk(self, "x") if "x" in mode else opened(self, mode, *args, **more)

        monkeypatch.setattr(Path, "open", unwritable)
    elif request.param == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    else:
        monkeypatch.setattr(Path, "replace", fail)
    return request.param


@pytest.mark.usefixtures("broken")
def test_a_failed_save_leaves_the_old_file_and_nothing_else(
    state: CheckpointState, adamw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "checkpoint"
    old = (adamw / "checkpoint").read_bytes()
    file.write_bytes(old)
    state.parameters["fc2.bias"].data[:] = 7
    with pytest.raises(
        SaveError, match=r"cannot save the checkpoint .*checkpoint\n.*No space left"
    ):
        CheckpointState.save_checkpoint(state, file, include_optimizer_state=True)
    assert list(tmp_path.iterdir()) == [file]
    assert file.read_bytes() == old
    monkeypatch.undo()
    CheckpointState.save_checkpoint(state, file)
    assert list(tmp_path.iterdir()) == [file]
    assert_same(CheckpointState.load_checkpoint(file), state)


def test_an_interrupted_save_leaves_the_old_file_too(
    state: CheckpointState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    file = tmp_path / "checkpoint"
    file.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        CheckpointState.save_checkpoint(state, file)
    assert [(path, path.read_bytes()) for path in tmp_path.iterdir()] == [(file, b"old")]


def test_a_folder_that_cannot_be_synchronized_is_told(
    state: CheckpointState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_for_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail_for_folders)
    with pytest.raises(SaveError, match="the new file is complete and in its place"):
        CheckpointState.save_checkpoint(state, tmp_path / "checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert_same(CheckpointState.load_checkpoint(tmp_path / "checkpoint"), state)


def test_a_file_system_that_does_not_synchronize_folders_is_taken(
    state: CheckpointState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse_folders)
    CheckpointState.save_checkpoint(state, tmp_path / "checkpoint")
    assert_same(CheckpointState.load_checkpoint(tmp_path / "checkpoint"), state)


def test_a_missing_folder_is_told(state: CheckpointState, tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="there is no folder"):
        CheckpointState.save_checkpoint(state, tmp_path / "none" / "checkpoint")


# -- bad files -----------------------------------------------------------------------------------


def _described(**changes: str) -> Metadata:
    """The metadata with changes, and the hash that goes with them."""
    metadata = artifacts.description() | changes
    from ortrain.ondevice.running.checkpoint_file import model_hash

    return metadata | {"model": model_hash(metadata["parameters"], metadata["buffers"])}


def save(tensors: Tensors, metadata: Metadata | None = None) -> bytes:
    content = unsealed(tensors, metadata)
    return sealing.sealed(content) if sealing.MARK in content else content


def _without(tensors: Tensors, *names: str) -> Tensors:
    return {name: value for name, value in tensors.items() if name not in names}


def _bfloat16() -> bytes:
    rows = artifacts.description()["parameters"].replace('"F32"', '"BF16"', 1)
    return save(artifacts.initial(), _described(parameters=rows))


INITIAL = artifacts.initial()
ZEROS = {"fc1.weight.exp_avg": np.zeros((4, 8), np.float32)}
WHOLE = save(INITIAL, artifacts.description())
BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "cannot read"),
    "cut in the header": (lambda: WHOLE[:100], "cannot read"),
    "cut in the tensors": (lambda: WHOLE[:-1], "cannot read"),
    "no safetensors": (lambda: b"PK\x03\x04" + bytes(100), "no safetensors file"),
    "no metadata": (lambda: save(INITIAL), "is no checkpoint of on-device training"),
    "other metadata": (lambda: save(INITIAL, {"format": "pt"}), "is no checkpoint of"),
    "newer": (
        lambda: save(INITIAL, _described(version="3")),
        r"has version 3\n.*versions up to 2\n.*update ortrain",
    ),
    "version missing": (
        lambda: save(INITIAL, {"format": "ortrain.checkpoint"}),
        r"damaged\n.*'version' is missing",
    ),
    "list missing": (
        lambda: save(INITIAL, {k: v for k, v in _described().items() if k != "states"}),
        "'states' is missing",
    ),
    "list damaged": (lambda: save(INITIAL, _described(buffers="[{")), "metadata .* is damaged"),
    "list of another form": (lambda: save(INITIAL, _described(buffers="[1]")), "is damaged"),
    "hash of another": (
        lambda: save(INITIAL, artifacts.description() | {"model": "0" * 64}),
        "'model' is not the hash",
    ),
    "step no number": (lambda: save(INITIAL, _described(step="two")), "is damaged"),
    "version 0": (lambda: save(INITIAL, _described(version="0")), "its version is 0"),
    "rate no number": (
        lambda: save(INITIAL, _described(learning_rate="nan")),
        "its learning rate is nan",
    ),
    "property no number": (
        lambda: save(INITIAL, _described(properties='{"a": [1]}')),
        r"the property 'a' is \[1\]",
    ),
    "tensors missing": (
        lambda: save(_without(INITIAL, "scale", "norm.mean"), _described()),
        r"is not whole\n.*scale is missing, norm\.mean is missing",
    ),
    "another shape": (
        lambda: save(INITIAL | {"scale": np.zeros(9, np.float32)}, _described()),
        r"scale is float32 \[9\], and should be float32 \[8\]",
    ),
    "another dtype": (
        lambda: save(INITIAL | {"scale": np.zeros(8, np.int32)}, _described()),
        r"scale is int32 \[8\], and should be float32 \[8\]",
    ),
    "unlisted": (
        lambda: save(INITIAL | {"w": np.zeros(1, np.float32)}, _described()),
        "w is not in its list of tensors",
    ),
    "some states": (
        lambda: save(INITIAL | ZEROS, _described()),
        r"fc1\.weight\.exp_avg_sq is missing, .* and 2 more",
    ),
    "bfloat16": (_bfloat16, r"'fc1\.weight' .* is of dtype BF16\n.*numpy has no such dtype"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_checkpoint_is_refused_by_name(fault: str, tmp_path: Path) -> None:
    content, message = BAD[fault][0](), BAD[fault][1]
    file = tmp_path / "bad.safetensors"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        CheckpointState.load_checkpoint(file)
    assert str(file) in str(caught.value)
    assert caught.value.help
    with pytest.raises(InputError, match=message):
        CheckpointState.load_checkpoint(content)


def test_a_missing_checkpoint_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read the checkpoint .*none\n.*No such file"):
        CheckpointState.load_checkpoint(tmp_path / "none")


NESTED = "[" * 100_000 + "]" * 100_000
UNREADABLE = {
    "deep properties": ("properties", NESTED),
    "deep parameters": ("parameters", NESTED),
    "a step beyond all": ("step", "1" + "0" * 30),
    "a step of many digits": ("step", "9" * 5000),
    "a seed beyond 64 bits": ("seed", str(1 << 63)),
    "a step with a line": ("step", "1_0"),
    "digits of another script": ("step", "１２"),
    "an endless rate": ("learning_rate", "1e999"),
    "an int of many digits": ("properties", '{"a": ' + "9" * 5000 + "}"),
}


@pytest.mark.parametrize("fault", UNREADABLE)
def test_numbers_and_nesting_beyond_all_bounds_are_one_error(fault: str) -> None:
    key, text = UNREADABLE[fault]
    with pytest.raises(InputError, match="is damaged"):
        CheckpointState.load_checkpoint(save(INITIAL, _described(**{key: text})))


def test_numbers_that_no_checkpoint_could_hold_are_refused(state: CheckpointState) -> None:
    with pytest.raises(ValueError, match="whole number of 64 bits"):
        state.seed = 10**30
    with pytest.raises(ValueError, match="'big' has 16610 bits"):
        state.properties["big"] = 10**5000
    state.properties["large"] = 10**30


def test_more_properties_than_a_header_holds_are_refused(
    state: CheckpointState, tmp_path: Path
) -> None:
    state.properties["log"] = "x" * 100_000_000
    with pytest.raises(SaveError, match="keep large properties in a file of their own"):
        CheckpointState.save_checkpoint(state, tmp_path / "checkpoint")
    assert not [*tmp_path.iterdir()]


def test_what_lives_in_this_process_is_not_pickled(adamw: Path) -> None:
    state, module, optimizer = load(adamw)
    step = TrainStep(adamw / "train_step_model.onnx", state)
    scheduler = LinearLRScheduler(optimizer, 1, 8, 0.05)
    weight = state.parameters["scale"]
    for each in (state, module, optimizer, step, scheduler, weight, state.parameters):
        for call in (pickle.dumps, copy.deepcopy, copy.copy):
            with pytest.raises(StateError, match="cannot be pickled or copied") as caught:
                call(each)
            assert "save_checkpoint" in caught.value.help
    assert pickle.loads(pickle.dumps(dict(state.properties))) == {}


# -- nominal -------------------------------------------------------------------------------------


@pytest.fixture
def nominal(adamw: Path) -> CheckpointState:
    return CheckpointState.load_checkpoint(adamw / "nominal_checkpoint")


def test_a_nominal_checkpoint_knows_its_parameters_without_values(nominal: CheckpointState) -> None:
    assert [name for name, _ in nominal.parameters] == list(artifacts.SHAPES)
    assert nominal.parameters["scale"].requires_grad is False
    assert "no value" in repr(nominal.parameters["scale"])
    with pytest.raises(StateError, match=r"scale has no value\n.*nominal"):
        nominal.parameters["scale"].data  # noqa: B018


def test_a_nominal_checkpoint_stays_one_when_saved(
    nominal: CheckpointState, tmp_path: Path
) -> None:
    nominal.properties["round"] = 1
    CheckpointState.save_checkpoint(nominal, tmp_path / "saved")
    assert _metadata(tmp_path / "saved")["nominal"] == "true"
    assert load_file(tmp_path / "saved") == {}
    loaded = CheckpointState.load_checkpoint(tmp_path / "saved")
    assert "no value" in repr(loaded.parameters["scale"])


def test_a_half_loaded_checkpoint_is_not_saved(nominal: CheckpointState, tmp_path: Path) -> None:
    nominal.parameters["scale"] = np.ones(8, np.float32)
    with pytest.raises(StateError, match="Cannot perform save with a nominal state"):
        CheckpointState.save_checkpoint(nominal, tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_a_completed_checkpoint_is_nominal_no_longer(
    nominal: CheckpointState, state: CheckpointState, tmp_path: Path
) -> None:
    for name, parameter in state.parameters:
        nominal.parameters[name] = parameter.data
    nominal.buffers["norm.mean"] = state.buffers["norm.mean"].data
    CheckpointState.save_checkpoint(nominal, tmp_path / "saved")
    assert "nominal" not in _metadata(tmp_path / "saved")
    assert_same(CheckpointState.load_checkpoint(tmp_path / "saved"), state)

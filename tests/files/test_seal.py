"""A seal finds every bit that differs, in every format that has one."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from ortrain.deploy import export_onnx
from ortrain.errors import InputError, OrtrainWarning
from ortrain.files import seal
from ortrain.ondevice import CheckpointState, Module
from ortrain.ondevice.artifacts import LossType, generate_artifacts
from ortrain.ondevice.running import checkpoint_file
from ortrain.program import Program
from tests.files import sealing


def _content() -> checkpoint_file.Content:
    weights = {
        "w": (np.arange(6, dtype=np.float32).reshape(2, 3), True),
        "b": (np.ones(3, np.float32), False),
    }
    content = checkpoint_file.new(weights, {"mean": np.zeros(3, np.float32)})
    content.properties |= {"note": '"checksum":"ortrain.crc32:00000000"', "epoch": 3}
    content.step, content.seed, content.learning_rate = 7, 8, 0.001
    return content


def _told(content: checkpoint_file.Content) -> object:
    """All that a checkpoint says."""
    tensors = {name: (a.dtype, a.shape, a.tobytes()) for name, a in content.tensors.items()}
    specs = (content.parameters, content.buffers, content.states, content.texts)
    counted = (content.step, content.seed, content.learning_rate)
    return specs, tensors, content.properties, counted


def _flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts in both formats."""
    place = tmp_path_factory.mktemp("sealed")
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    generate_artifacts(
        module,
        loss=LossType.MSELoss,
        artifact_directory=place,
        ort_format=True,
        example_inputs=[torch.zeros(2, 3)],
    )
    checkpoint_file.write(_content(), place / "small")
    return place


def test_every_flipped_bit_of_a_checkpoint_is_found_or_changes_nothing(folder: Path) -> None:
    whole = (folder / "small").read_bytes()
    told = _told(checkpoint_file.read(whole))
    for bit in range(8 * len(whole)):
        try:
            found = checkpoint_file.read(_flipped(whole, bit))
        except InputError:
            continue
        assert _told(found) == told


def test_a_checkpoint_on_the_disk_is_refused_as_one_in_memory_is(folder: Path) -> None:
    whole = (folder / "small").read_bytes()
    generator = np.random.default_rng(0)
    file = folder / "damaged"
    for bit in generator.choice(8 * len(whole), 200, replace=False):
        file.write_bytes(_flipped(whole, int(bit)))
        with pytest.raises(InputError):
            checkpoint_file.read(file)
    for end in range(0, len(whole), 7):
        file.write_bytes(whole[:end])
        with pytest.raises(InputError):
            checkpoint_file.read(file)


def test_large_checkpoints_are_sealed_by_threads_alike(tmp_path: Path) -> None:
    array = np.random.default_rng(1).standard_normal((3, 1 << 20), np.float32)
    content = checkpoint_file.new({"w": (array, True), "none": (array[:0], True)}, {})
    checkpoint_file.write(content, tmp_path / "large")
    whole = (tmp_path / "large").read_bytes()
    assert sealing.sealed(whole) == whole
    np.testing.assert_array_equal(checkpoint_file.read(tmp_path / "large").tensors["w"], array)
    (tmp_path / "large").write_bytes(_flipped(whole, 8 * len(whole) - 8_000_001))
    with pytest.raises(InputError, match="is damaged"):
        checkpoint_file.read(tmp_path / "large")


@pytest.mark.parametrize("name", ["training_model.onnx", "training_model.ort"])
def test_flipped_bits_of_a_model_are_found(folder: Path, name: str) -> None:
    whole = (folder / name).read_bytes()
    at = seal.find(whole)
    mark = range(8 * (at - len(seal.MARK)), 8 * at)  # without it the model counts as unsealed
    generator = np.random.default_rng(2)
    for bit in generator.choice(8 * len(whole), 2000, replace=False):
        if bit not in mark and bit // 8 not in range(4, 8):  # which say that it is in ORT format
            with pytest.raises(InputError, match="is damaged"):
                seal.is_whole(_flipped(whole, int(bit)), "model")


def test_what_was_saved_is_whole(folder: Path) -> None:
    for name in ("training_model.onnx", "training_model.ort", "eval_model.onnx"):
        assert seal.is_file_whole(folder / name, name)
    for name in ("training_model.onnx", "checkpoint"):
        whole = (folder / name).read_bytes()
        assert sealing.sealed(whole) == whole


def test_a_damaged_model_is_refused_before_it_runs(folder: Path, tmp_path: Path) -> None:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    whole = (folder / "training_model.onnx").read_bytes()
    damaged = _flipped(whole, 8 * (len(whole) // 2))
    (tmp_path / "model.onnx").write_bytes(damaged)
    for uri in (damaged, tmp_path / "model.onnx"):
        with pytest.raises(InputError, match=r"training model .* is damaged"):
            Module(uri, state)


def test_a_model_that_another_program_has_written_again_is_told_from_a_damaged_one(
    folder: Path, tmp_path: Path
) -> None:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    path = tmp_path / "model.onnx"
    onnx.save(onnx.load(folder / "training_model.onnx"), path)
    with pytest.warns(OrtrainWarning, match="training model.* was written again by another"):
        Module(path, state)
    with pytest.raises(InputError, match="was written again by another program"):
        seal.is_model_whole(path, "model", strict=True)
    assert seal.seal_again(path)
    whole = path.read_bytes()
    assert seal.is_model_whole(path, "model", strict=True)
    assert whole.startswith(seal.model_entry()[: -seal.DIGITS])
    assert whole.count(seal.MARK) == 1
    for bit in np.random.default_rng(3).choice(8 * len(whole), 500, replace=False):
        at = seal.find(whole)
        if bit // 8 not in range(at - len(seal.MARK), at):
            with pytest.raises(InputError, match="is damaged"):
                seal.is_whole(_flipped(whole, int(bit)), "model")


def test_the_file_of_weights_is_sealed_again_with_its_model(tmp_path: Path) -> None:
    export_onnx(
        torch.nn.Linear(32, 32),
        [{"input": torch.zeros(1, 32)}],
        tmp_path / "model.onnx",
        external_data_above=1,
    )
    model, data = tmp_path / "model.onnx", tmp_path / "model.onnx.data"
    data.write_bytes(_flipped(data.read_bytes(), 100))
    with pytest.raises(InputError, match=r"model\.onnx\.data is damaged"):
        seal.is_model_whole(model, "model")
    assert seal.seal_again(model)
    assert seal.is_model_whole(model, "model")


def test_an_older_model_and_checkpoint_load_with_a_word(folder: Path) -> None:
    model = onnx.load(folder / "training_model.onnx")
    kept = [entry for entry in model.metadata_props if entry.key != seal.KEY]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    whole = (folder / "checkpoint").read_bytes()
    old = whole.replace(b'"version":"2"', b'"version":"1"').replace(b'"checksum"', b'"_hecksum"')
    with pytest.warns(OrtrainWarning, match=r"has no checksum, as older ones.*save it again"):
        state = CheckpointState.load_checkpoint(old)
    with pytest.warns(OrtrainWarning, match=r"has no checksum.*make it anew"):
        Module(model.SerializeToString(), state)
    with pytest.raises(InputError, match="its checksum is missing"):
        CheckpointState.load_checkpoint(whole.replace(b'"checksum"', b'"_hecksum"'))


def test_a_program_is_sealed_with_the_file_of_its_weights(tmp_path: Path) -> None:
    weight = ir.val("w", const_value=ir.tensor(np.ones((64, 64), np.float32)))
    x = ir.val("x", ir.DataType.FLOAT, [1, 64])
    node = ir.node("MatMul", [x, weight])
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[weight], name="g")
    graph.opset_imports[""] = 18
    program = Program(ir.Model(graph, ir_version=10))
    program.save(tmp_path / "model.onnx", external_data_above=100)
    assert not program.model.metadata_props
    loaded = Program.load(tmp_path / "model.onnx")
    assert not {seal.KEY, seal.DATA_KEY} & {*loaded.model.metadata_props}
    for name in ("model.onnx", "model.onnx.data"):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(_flipped(whole, 8 * (len(whole) // 3)))
        with pytest.raises(InputError, match="is damaged"):
            Program.load(tmp_path / "model.onnx")
        (tmp_path / name).write_bytes(whole)


def test_a_sealed_archive_of_torch_is_one(tmp_path: Path) -> None:
    with (tmp_path / "state.pt").open("w+b") as file:
        torch.save({"a": torch.arange(1000)}, file)
        seal.append_to_zip(file)
    whole = (tmp_path / "state.pt").read_bytes()
    assert torch.load(io.BytesIO(whole), weights_only=True)["a"].sum() == 499500
    assert zipfile.ZipFile(io.BytesIO(whole)).testzip() is None
    mark = range(8 * (len(whole) - 8 - len(seal.MARK)), 8 * (len(whole) - 8))
    for bit in range(0, 8 * len(whole), 13):
        if bit not in mark:
            with pytest.raises(InputError, match="is damaged"):
                seal.is_whole(_flipped(whole, bit), "archive")


@pytest.mark.parametrize("make", [lambda: b"", lambda: b"ortrain.crc32", lambda: b"any text"])
def test_what_has_no_seal_is_not_judged(make: Callable[[], bytes]) -> None:
    assert not seal.is_whole(make(), "file")

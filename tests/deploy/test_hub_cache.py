"""A folder of a hub's cache, whose files are links to ``blobs``, is read as any other."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ortrain.cli import main
from ortrain.deploy import (
    AutoCalibrationConfig,
    AutoOptimizationConfig,
    AutoQuantizationConfig,
    GoldenSet,
    ORTOptimizer,
    ORTQuantizer,
)
from ortrain.deploy.equivalence.comparison import compare
from ortrain.deploy.model_folder import load_model
from ortrain.deploy.models import ORTModelForSequenceClassification
from ortrain.deploy.models.files import external_files
from ortrain.errors import InputError
from ortrain.ondevice.making.onnx_source import read
from ortrain.program import Program
from tests.deploy import classifiers

BATCHES, _ = classifiers.batches(((8, 5),))


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A folder of files, with the weights beside the model."""
    said = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}
    place = classifiers.folder(tmp_path / "plain", config=said)
    onnx.save(
        onnx.load(place / "model.onnx"),
        place / "model.onnx",
        save_as_external_data=True,
        location="model.onnx_data",
        size_threshold=0,
    )
    return place


@pytest.fixture
def snapshot(plain: Path, tmp_path: Path) -> Path:
    """The same files as a hub's cache has them."""
    cache = tmp_path / "hub" / "models--someone--model"
    place = cache / "snapshots" / "0123abcd"
    place.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for file in plain.iterdir():
        blob = hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copyfile(file, cache / "blobs" / blob)
        (place / file.name).symlink_to(Path("..", "..", "blobs", blob))
    return place


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    path = tmp_path / "examples.npz"
    np.savez(path, allow_pickle=False, **BATCHES[0])  # type: ignore[arg-type]
    return path


def test_the_commands_take_it(
    snapshot: Path,
    plain: Path,
    examples: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(snapshot.parent)
    snapshot = Path(snapshot.name)
    for number, (command, *options) in enumerate(
        (
            ("optimize", "-O1"),
            ("optimize", "-O2", "--validate", str(examples)),
            ("quantize", "--preset", "avx2"),
            ("quantize", "--preset", "avx2", "--static", "--calibrate", str(examples)),
            ("quantize", "--weight-only", "8", "--validate", str(examples)),
        )
    ):
        target = tmp_path / str(number)
        assert main([command, str(snapshot), "-o", str(target), *options]) == 0, command
        assert not any(path.is_symlink() for path in target.iterdir())
    few = ["--data", str(examples), "--latency-runs", "0"]
    assert main(["validate", str(snapshot / "model.onnx"), str(plain), *few]) == 0
    said = capsys.readouterr().out
    assert "difference  logits: largest 0, mean 0" in said
    assert "was not measured" not in said
    model = str(snapshot / "model.onnx")
    assert main(["check", str(snapshot), model]) == 0
    trained = ["--train", "weight", "--loss", "CrossEntropyLoss"]
    assert main(["artifacts", model, "-o", str(tmp_path / "a"), *trained]) == 0


def test_the_python_interface_takes_it(snapshot: Path, plain: Path, tmp_path: Path) -> None:
    golden = GoldenSet(BATCHES)
    optimizer = ORTOptimizer.from_pretrained(snapshot)
    optimizer.optimize(AutoOptimizationConfig.O1(), tmp_path / "optimized")
    quantizer = ORTQuantizer.from_pretrained(snapshot)
    ranges = quantizer.fit(BATCHES, AutoCalibrationConfig.minmax(BATCHES))
    config = AutoQuantizationConfig.avx2(is_static=True)
    quantizer.quantize(config, tmp_path / "small", calibration_tensors_range=ranges)
    for other in ("optimized", "small"):
        report = compare(snapshot, tmp_path / other, golden, latency_runs=0, memory=False)
        assert report.before.files.keys() >= {"model.onnx", "model.onnx_data"}
    model = ORTModelForSequenceClassification.from_pretrained(snapshot)
    (logits,) = model(**BATCHES[0], return_dict=False)
    model.save_pretrained(tmp_path / "saved")
    saved = tmp_path / "saved" / "model.onnx_data"
    assert not saved.is_symlink()
    assert saved.read_bytes() == (plain / "model.onnx_data").read_bytes()
    again = ORTModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    np.testing.assert_array_equal(again(**BATCHES[0], return_dict=False)[0], logits)


def test_weights_are_those_of_the_plain_folder(snapshot: Path, plain: Path) -> None:
    truth = {each.name: onnx.numpy_helper.to_array(each) for each in _initializers(plain)}
    readers: tuple[Callable[[Path], ir.Model], ...] = (
        load_model,
        lambda path: Program.load(path).model,
        lambda path: ir.from_proto(read(path)),
    )
    for reader in readers:
        found = reader(snapshot / "model.onnx").graph.initializers
        assert found.keys() == truth.keys()
        for name, array in truth.items():
            tensor = found[name].const_value
            assert tensor is not None
            np.testing.assert_array_equal(tensor.numpy(), array)


def test_a_file_with_a_second_name_on_the_disk_is_read(plain: Path, tmp_path: Path) -> None:
    os.link(plain / "model.onnx_data", tmp_path / "second")
    tensor = load_model(plain / "model.onnx").graph.initializers["bias"].const_value
    assert tensor is not None
    assert tensor.numpy().shape == (classifiers.CLASSES,)


@pytest.mark.parametrize("place", ["../outside", "{}/outside", "a/../../outside", "..\\outside"])
def test_a_model_that_names_weights_outside_of_its_folder_is_refused(
    place: str, plain: Path, tmp_path: Path
) -> None:
    shutil.copyfile(plain / "model.onnx_data", tmp_path / "outside")
    model = onnx.load(plain / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = place.format(tmp_path)
    path = plain / "model.onnx"
    path.write_bytes(model.SerializeToString())
    readers: tuple[Callable[[Path], Any], ...] = (load_model, Program.load, read, external_files)
    for reader in readers:
        with pytest.raises(InputError, match="leaves the folder"):
            reader(path)


def _initializers(folder: Path) -> list[onnx.TensorProto]:
    return list(onnx.load(folder / "model.onnx").graph.initializer)

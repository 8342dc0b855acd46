"""Folders of models: read, never written to, and published as a whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from ortrain.deploy import ModelFolder, model_folder
from ortrain.deploy.model_folder import (
    expect_suffix,
    external_files_of,
    load_model,
    published,
    save_model,
)
from ortrain.errors import InputError, OrtrainWarning, SaveError
from ortrain.files import seal
from tests.deploy import classifiers

TABLE = np.arange(4096, dtype=np.float32).reshape(64, 64)


def checksums(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def large() -> ir.Model:
    """A model with one weight of 16 KiB and one of 4 bytes."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]>\n'
        "g (float[n, 64] x) => (float[n, 64] y) { m = MatMul(x, table)\n y = Mul(m, factor) }"
    )
    for name, value in (("table", TABLE), ("factor", np.float32(2))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    return ir.from_proto(model)


def answer(path: Path) -> Any:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": np.eye(2, 64, dtype=np.float32)})[0]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with a model whose weights lie beside it, a tokenizer and an older report."""
    folder = tmp_path / "source"
    folder.mkdir()
    save_model(large(), folder / "model.onnx", external=True)
    for name in ("config.json", "tokenizer.json", "vocab.txt", "spiece.model", "modeling.py"):
        (folder / name).write_text("{}")
    for name in (
        "equivalence.json",
        "equivalence.html",
        "ort_config.json",
        "weights.safetensors",
        "model.safetensors.index.json",
        "notes.md",
        "trainer_state.json",
    ):
        (folder / name).write_text("{}")
    return folder


# --- opened -------------------------------------------------------------------------------------


def test_a_folder_has_its_files_and_its_configuration(tmp_path: Path) -> None:
    folder = classifiers.folder(tmp_path, name="b.onnx")
    classifiers.folder(tmp_path, name="a.onnx")
    found = ModelFolder.open(folder)
    assert found.files == ("a.onnx", "b.onnx")
    assert found.config["id2label"] == {"0": "red", "1": "green", "2": "blue"}
    assert ModelFolder.open(folder, ["b.onnx"]).files == ("b.onnx",)
    one = ModelFolder.open(folder / "b.onnx")
    assert (one.path, one.files) == (folder, ("b.onnx",))
    (folder / "config.json").unlink()
    assert ModelFolder.open(folder).config == {}


def test_what_is_no_folder_of_a_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no model at"):
        ModelFolder.open(tmp_path / "nothing")
    with pytest.raises(InputError, match="has no ONNX file"):
        ModelFolder.open(tmp_path)
    classifiers.folder(tmp_path / "onnx")
    with pytest.raises(InputError, match="has no ONNX file") as raised:
        ModelFolder.open(tmp_path)
    assert raised.value.help == f"give {tmp_path / 'onnx'}"
    with pytest.raises(InputError, match=r"has no file other\.onnx") as raised:
        ModelFolder.open(tmp_path / "onnx", ["other.onnx"])
    assert raised.value.because == "its ONNX files are model.onnx"
    with pytest.raises(InputError, match=r"is no \.onnx file"):
        ModelFolder.open(tmp_path / "onnx" / "config.json")
    for kind in (3, None):
        with pytest.raises(TypeError, match="source="):
            ModelFolder.open(kind)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="file_names="):
        ModelFolder.open(tmp_path, "model.onnx")


@pytest.mark.parametrize("text", ["{", "[]", "\xff", "[" * 100_000])
def test_a_configuration_that_is_none_is_told(text: str, tmp_path: Path) -> None:
    folder = classifiers.folder(tmp_path)
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=r"config\.json is no configuration of a model"):
        ModelFolder.open(folder)


def test_weights_stay_where_they_are(source: Path) -> None:
    model = ModelFolder.open(source).load("model.onnx")
    tensor = model.graph.initializers["table"].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    assert external_files_of(model) == (source / "model.onnx_data",)


def damaged(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return apply


def elsewhere(folder: Path) -> None:
    """The weights lie outside the folder."""
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    del model.metadata_props[:]
    shutil.move(folder / "model.onnx_data", folder.parent / "weights")
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../weights"
    (folder / "model.onnx").write_bytes(model.SerializeToString())


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (damaged("model.onnx", lambda b: b[: len(b) // 2]), "is damaged|cannot be read"),
    "empty": (damaged("model.onnx", lambda b: b""), "cannot be read as an ONNX model"),
    "text": (damaged("model.onnx", lambda b: b"<html>not found</html>"), "cannot be read as an"),
    "bits": (damaged("model.onnx", lambda b: b[:-9] + bytes([b[-9] ^ 1]) + b[-8:]), "is damaged"),
    "weights missing": (lambda f: (f / "model.onnx_data").unlink(), "has no weight table"),
    "weights cut": (damaged("model.onnx_data", lambda b: b[:-1]), "is damaged"),
    "weights changed": (damaged("model.onnx_data", lambda b: b[:-1] + b"?"), "is damaged"),
    "weights elsewhere": (elsewhere, "has no weight table"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_model_is_told(kind: str, source: Path) -> None:
    damage, message = DAMAGES[kind]
    damage(source)
    before = checksums(source)
    with pytest.raises(InputError, match=message):
        ModelFolder.open(source).load("model.onnx")
    assert checksums(source) == before


def test_weights_that_are_cut_are_told_without_a_seal_as_well(source: Path) -> None:
    model = onnx.load(source / "model.onnx", load_external_data=False)
    del model.metadata_props[:]
    (source / "model.onnx").write_bytes(model.SerializeToString())
    damaged("model.onnx_data", lambda content: content[:-1])(source)
    with pytest.raises(InputError, match="has no weight table") as raised:
        load_model(source / "model.onnx")
    assert "has 16383 bytes, and the weight ends at 16384" in raised.value.because


def test_a_weight_that_is_too_short_within_the_file_is_told(source: Path) -> None:
    model = onnx.load(source / "model.onnx")
    weight = next(each for each in model.graph.initializer if each.name == "table")
    weight.raw_data = weight.raw_data[:-4]
    onnx.save(model, source / "model.onnx")
    with (
        pytest.warns(OrtrainWarning, match="was written again by another program"),
        pytest.raises(InputError, match="has no weight table"),
    ):
        load_model(source / "model.onnx")


# --- saved --------------------------------------------------------------------------------------


@pytest.mark.parametrize("external", [None, True, False])
@pytest.mark.parametrize("one_file", [True, False])
def test_a_model_answers_the_same_however_it_is_saved(
    external: bool | None, one_file: bool, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "new").mkdir()
    path = tmp_path / "new" / "again.onnx"
    model = ModelFolder.open(source).load("model.onnx")
    save_model(model, path, external=external, one_file=one_file)
    assert isinstance(model.graph.initializers["table"].const_value, ir.ExternalTensor)
    assert np.array_equal(answer(path), TABLE[:2] * 2)
    beside = {p.name for p in path.parent.iterdir()} - {path.name}
    if not external:
        assert beside == set()
    elif one_file:
        assert beside == {"again.onnx_data"}
    else:
        assert len(beside) == 1
        assert next(iter(beside)).endswith(".onnx_data")
    assert seal.is_model_whole(path, "model")
    assert np.array_equal(answer(source / "model.onnx"), TABLE[:2] * 2)


def test_large_weights_go_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.onnx"
    monkeypatch.setattr(model_folder, "EXTERNAL_ABOVE", 10_000)
    save_model(large(), path)
    assert (tmp_path / "model.onnx_data").stat().st_size == TABLE.nbytes
    (tmp_path / "model.onnx_data").unlink()
    monkeypatch.setattr(model_folder, "INSIDE_AT_MOST", 10_000)
    save_model(large(), path, external=False)
    assert (tmp_path / "model.onnx_data").is_file()


def test_small_weights_alone_make_no_file_beside(tmp_path: Path) -> None:
    model = large()
    model.graph.initializers["table"].const_value = ir.tensor(np.ones((1, 64), np.float32))
    save_model(model, tmp_path / "model.onnx", external=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    assert seal.is_model_whole(tmp_path / "model.onnx", "model")


def test_small_weights_that_were_beside_another_file_come_along(tmp_path: Path) -> None:
    model = large()
    small = np.arange(64, dtype=np.float32)
    model.graph.initializers["table"].const_value = ir.tensor(small[None])
    (tmp_path / "a").mkdir()
    ir.save(model, tmp_path / "a" / "model.onnx", external_data="weights", size_threshold_bytes=0)
    loaded = load_model(tmp_path / "a" / "model.onnx")
    assert external_files_of(loaded)
    (tmp_path / "b").mkdir()
    save_model(loaded, tmp_path / "b" / "model.onnx", external=True)
    again = load_model(tmp_path / "b" / "model.onnx")
    assert not external_files_of(again)
    tensor = again.graph.initializers["table"].const_value
    assert tensor is not None
    assert tensor.numpy().tolist() == [small.tolist()]


def test_weights_of_an_old_format_are_no_inputs(tmp_path: Path) -> None:
    model = large()
    model.graph.inputs.append(model.graph.initializers["table"])
    model.ir_version = 3
    ir.save(model, tmp_path / "model.onnx")
    loaded = load_model(tmp_path / "model.onnx")
    assert "table" not in [value.name for value in loaded.graph.inputs]
    assert loaded.ir_version == 4
    model.ir_version = 4  # from here on it may be fed
    ir.save(model, tmp_path / "model.onnx")
    assert "table" in [value.name for value in load_model(tmp_path / "model.onnx").graph.inputs]


# --- published ----------------------------------------------------------------------------------


def test_what_goes_along_is_copied_as_it_is(source: Path, tmp_path: Path) -> None:
    before = checksums(source)
    with published(ModelFolder.open(source), tmp_path / "a" / "b", "model") as folder:
        (folder / "new.onnx").write_bytes(b"new")
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == [
        "config.json",
        "modeling.py",
        "new.onnx",
        "spiece.model",
        "tokenizer.json",
        "vocab.txt",
    ]
    assert checksums(source) == before


def test_an_older_report_does_not_stay_beside_new_files(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    for name in ("equivalence.json", "equivalence.html", "README.md"):
        (target / name).write_text("old")
    with published(ModelFolder.open(source), target, "model") as folder:
        (folder / "equivalence.json").write_text("new")
    assert (target / "equivalence.json").read_text() == "new"
    assert not (target / "equivalence.html").exists()
    assert (target / "README.md").read_text() == "old"


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ValueError, SaveError])
def test_nothing_is_left_of_what_was_interrupted(
    error: type[BaseException], source: Path, tmp_path: Path
) -> None:
    before, target = checksums(source), tmp_path / "a" / "b"

    def interrupted(folder: Path) -> None:
        (folder / "new.onnx").write_bytes(b"half")
        raise error("stop")

    with (
        pytest.raises(error, match="^stop$" if error is not KeyboardInterrupt else None),
        published(ModelFolder.open(source), target, "model") as folder,
    ):
        interrupted(folder)
    assert not (tmp_path / "a").exists()
    target.mkdir(parents=True)
    (target / "new.onnx").write_bytes(b"old")
    with (
        pytest.raises(error, match="^stop$" if error is not KeyboardInterrupt else None),
        published(ModelFolder.open(source), target, "model") as folder,
    ):
        interrupted(folder)
    assert checksums(target) == {"new.onnx": hashlib.sha256(b"old").hexdigest()}
    assert checksums(source) == before


def test_a_full_disk_is_told_and_leaves_what_was_there(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, target = checksums(source), tmp_path / "target"
    target.mkdir()
    (target / "model.onnx").write_bytes(b"old")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = ModelFolder.open(source).load("model.onnx")
    for place, name in ((shutil, "copyfile"), (ir, "save"), (seal, "seal_model")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, full)
            with (
                pytest.raises(SaveError, match=r"cannot save the optimized model") as raised,
                published(ModelFolder.open(source), target, "optimized model") as folder,
            ):
                save_model(model, folder / "model.onnx")
        assert "No space left on device" in raised.value.because
        assert "nothing has been replaced" in raised.value.help
        assert checksums(target) == {"model.onnx": hashlib.sha256(b"old").hexdigest()}
    assert checksums(source) == before


def test_a_target_that_cannot_be_written_is_told(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("a file")
    with (
        pytest.raises(SaveError, match="cannot save the model"),
        published(ModelFolder.open(source), tmp_path / "file", "model"),
    ):
        raise AssertionError

    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    target = tmp_path / "read-only"
    target.mkdir()
    monkeypatch.setattr(Path, "mkdir", refuse)
    with (
        pytest.raises(SaveError, match="cannot save the model") as raised,
        published(ModelFolder.open(source), target, "model"),
    ):
        raise AssertionError
    assert "Permission denied" in raised.value.because
    assert list(target.iterdir()) == []


def test_the_source_is_no_target_by_whatever_name(source: Path, tmp_path: Path) -> None:
    before = checksums(source)
    (tmp_path / "link").symlink_to(source)
    for target in (source, source / ".." / "source", tmp_path / "link"):
        with (
            pytest.raises(ValueError, match="is the folder of the source"),
            published(ModelFolder.open(source), target, "model"),
        ):
            raise AssertionError
    target = tmp_path / "target"
    target.mkdir()
    (target / "model.onnx").symlink_to(source / "model.onnx")
    with (
        pytest.raises(SaveError, match="cannot save the model") as raised,
        published(ModelFolder.open(source), target, "model") as folder,
    ):
        (folder / "model.onnx").write_bytes(b"new")
    assert "is a link to a file of the source" in raised.value.because
    assert checksums(source) == before


@pytest.mark.parametrize("suffix", ["a/b", "a\\b", "\0"])
def test_a_suffix_that_no_name_can_have_is_an_error(suffix: str) -> None:
    with pytest.raises(ValueError, match="file_suffix="):
        expect_suffix(suffix)

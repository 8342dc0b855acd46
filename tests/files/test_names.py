"""Names that are joined to a folder stay in it, wherever they come from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
import torch

from ortrain.classic.checkpoint import load_flat, save_flat
from ortrain.cli import main
from ortrain.deploy import ModelFolder, export_onnx
from ortrain.deploy.models import ORTModelForFeatureExtraction
from ortrain.errors import InputError
from ortrain.files import seal
from ortrain.files.names import expect_name_part, expect_within, leads_out
from ortrain.hooks.merge_activation_summary import merge
from ortrain.ondevice.artifacts import generate_artifacts
from ortrain.trainer import ORTTrainingArguments
from ortrain.trainer.checkpoints import unfinished

OUT = ("../x", "a/../../x", "/x", "..\\x", "C:\\x", "\\x", "C:x", "a\0b", "", "..")


@pytest.mark.parametrize("name", OUT)
def test_a_name_that_leads_out_of_its_folder_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leaves the folder"):
        expect_within(tmp_path, name)


@pytest.mark.parametrize("name", ["x", "onnx/model.onnx_data", "onnx::MatMul_7", "..x", "a..b/c."])
def test_a_name_within_its_folder_is_joined_to_it(name: str, tmp_path: Path) -> None:
    assert expect_within(tmp_path, name) == tmp_path / name
    assert not leads_out(name)


def test_a_part_of_a_name_has_no_separators() -> None:
    assert expect_name_part("prefix", "..run-1.") == "..run-1."
    for text in ("a/", "../", "a\\b", "a\0"):
        with pytest.raises(ValueError, match=r"prefix=.*: expected a part of a name"):
            expect_name_part("prefix", text)


def _trainer(place: Path) -> object:
    return ORTTrainingArguments(str(place), report_to="none", use_cpu=True, onnx_prefix="../x")


def _index(place: Path) -> object:
    (place / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../x"}}')
    return unfinished(place, whole=True)


def _statistics(place: Path) -> object:
    step = place / "pt" / "step_1"
    step.mkdir(parents=True)
    (step / "order.txt").write_text("../../x\n")
    return merge(place / "pt", place / "pt", place / "merged")


_TRAINING = SimpleNamespace(
    weights={}, states=dict, partitioned=False, stepper=SimpleNamespace(world=1)
)
USES: dict[str, Callable[[Path], object]] = {
    "the trainer's prefix": _trainer,
    "the prefix of artifacts": lambda place: generate_artifacts(
        onnx.ModelProto(), prefix="../x", artifact_directory=place
    ),
    "the prefix of a checkpoint that is written": lambda place: save_flat(
        _TRAINING, place, "../x", None, include_optimizer_state=False
    ),
    "the prefix of a checkpoint that is read": lambda place: load_flat(
        _TRAINING, place, "../x", strict=True
    ),
    "a file of a model": lambda place: ModelFolder(place, (), {}).load("../x"),
    "the name of an ONNX file": lambda place: ORTModelForFeatureExtraction.from_pretrained(
        place, file_name="../x"
    ),
    "a folder within": lambda place: ORTModelForFeatureExtraction.from_pretrained(
        place, subfolder=".."
    ),
    "an index of shards": _index,
    "a list of statistics": _statistics,
}


@pytest.mark.parametrize("use", USES)
def test_no_argument_and_no_file_names_a_file_outside_of_its_folder(
    use: str, tmp_path: Path
) -> None:
    place = tmp_path / "folder"
    place.mkdir()
    (tmp_path / "x").write_text("outside")
    with pytest.raises(
        ValueError, match=r"leads out|leaves|not in its folder|part of a name|no file"
    ):
        USES[use](place)
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "x"}


def test_the_commands_take_no_prefix_with_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (
        ["artifacts", "model.onnx", "-o", str(tmp_path)],
        ["ondevice", "run", str(tmp_path), "--data", "data.npz"],
    ):
        with pytest.raises(SystemExit):
            main([*command, "--prefix", "../x"])
        assert "'../x' is no part of a file's name" in capsys.readouterr().err


def test_a_checksum_of_a_file_outside_of_the_folder_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a" / "model.onnx"
    path.parent.mkdir()
    export_onnx(torch.nn.Linear(2, 2), [{"input": torch.zeros(1, 2)}], path)
    model = onnx.load(path)
    model.metadata_props.add(key=seal.DATA_KEY, value=seal.unsealed_data("../x"))
    onnx.save(model, path)
    (tmp_path / "x").write_bytes(b"outside")
    assert seal.seal_again(path)
    assert seal.is_model_whole(path, "model")  # nothing is read of what lies outside
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(InputError, match="is damaged"):
        seal.is_model_whole(path, "model")

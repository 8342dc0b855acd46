"""What goes along when a model is exported, saved and uploaded, and what it is rewritten from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import onnx
import pytest
import torch
from transformers import AutoTokenizer

from ortrain.deploy import (
    AutoOptimizationConfig,
    AutoQuantizationConfig,
    ORTOptimizer,
    ORTQuantizer,
)
from ortrain.deploy.models import ORTModel, ORTModelForSequenceClassification
from ortrain.deploy.models.files import external_files
from ortrain.errors import InputError, NotServed, SaveError, StateError
from tests.deploy.exported import call, folder, ort_model, torch_model
from tests.deploy.models.test_pipelines import tokenizer


def names(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a checkpoint with a tokenizer, and what belongs to others."""
    place = tmp_path_factory.mktemp("checkpoint")
    torch_model("classes").save_pretrained(place)
    tokenizer().save_pretrained(place)
    (place / "modules.json").write_text("[]")
    (place / "README.md").write_text("of the checkpoint")
    return place


def test_a_tokenizer_goes_along_and_no_file_of_another_tool(
    checkpoint: Path, tmp_path: Path
) -> None:
    model = ORTModelForSequenceClassification.from_pretrained(checkpoint, export=True)
    model.save_pretrained(tmp_path / "a", safe_serialization=True, max_shard_size="1GB")
    expected = {"model.onnx", "config.json", "tokenizer.json", "tokenizer_config.json"}
    assert names(tmp_path / "a") == expected
    again = ORTModelForSequenceClassification.from_pretrained(tmp_path / "a")
    again.save_pretrained(tmp_path / "b")
    assert names(tmp_path / "b") == expected
    text = "word7 word12"
    found = AutoTokenizer.from_pretrained(tmp_path / "b")(text)["input_ids"]
    assert found == tokenizer()(text)["input_ids"]
    with pytest.raises(TypeError, match=r"takes private with push_to_hub=True alone"):
        model.save_pretrained(tmp_path / "c", private=True)


def test_the_files_may_be_had_in_a_folder_of_their_own(checkpoint: Path, tmp_path: Path) -> None:
    model: Any = ORTModelForSequenceClassification.from_pretrained(checkpoint, export=True)
    plain = model._save_pretrained

    def below(place: Path) -> None:
        (Path(place) / "onnx").mkdir(exist_ok=True)
        plain(Path(place) / "onnx")

    model._save_pretrained = below
    for _ in range(2):  # where they are already, too
        model.save_pretrained(tmp_path)
    assert names(tmp_path) == {
        "onnx/model.onnx", "config.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    found = ORTModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(found(**call("classes", 2, 6)).logits, model(**call("classes", 2, 6)).logits)
    target = tmp_path.with_name("optimized")
    ORTOptimizer.from_pretrained(found).optimize(AutoOptimizationConfig.O2(), target)
    assert {"model_optimized.onnx", "config.json", "tokenizer.json"} <= names(target)
    for place in (tmp_path, tmp_path / "onnx"):
        with pytest.raises(ValueError, match="is the folder of the source"):
            ORTOptimizer.from_pretrained(found).optimize(AutoOptimizationConfig.O2(), place)


class Hub:
    """Takes the place of the hub."""

    def __init__(self, token: Any = None) -> None:
        self.token = token

    def create_repo(self, repo_id: str, **given: Any) -> Any:
        if repo_id == "no/such":
            raise huggingface_hub.errors.HFValidationError("not a repository")
        CALLS.append(("create", repo_id, self.token, given))
        return SimpleNamespace(repo_id=f"someone/{repo_id}")

    def upload_folder(self, *, folder_path: Path, **given: Any) -> Any:
        CALLS.append(("upload", names(Path(folder_path)), given))
        return SimpleNamespace(commit_url="https://hub/commit")


CALLS: list[tuple[Any, ...]] = []


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    CALLS.clear()
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)


def test_a_model_is_uploaded_as_it_is_saved(tmp_path: Path) -> None:
    model = ort_model("gpt2")
    assert model.push_to_hub("mine", token="t", private=True) == "https://hub/commit"
    create, upload = CALLS
    assert create == ("create", "mine", "t", {"private": True, "exist_ok": True})
    assert upload[1] == {"model.onnx", "config.json", "generation_config.json"}
    assert upload[2]["repo_id"] == "someone/mine"
    model.save_pretrained(tmp_path / "kept", push_to_hub=True, create_pr=True)
    assert CALLS[2][1] == "kept"
    assert CALLS[3][2]["create_pr"] is True
    with pytest.raises(SaveError, match=r"(?s)cannot upload .* to no/such.*not a repository"):
        model.push_to_hub("no/such")
    with pytest.raises(TypeError, match="repo_id=3: expected the name of a repository"):
        model.push_to_hub(3)


def test_of_a_loaded_model_its_own_files_are_rewritten(tmp_path: Path) -> None:
    place = Path(shutil.copytree(folder("classes"), tmp_path / "a"))
    (place / "other.onnx").write_bytes(b"no model")
    model = ORTModelForSequenceClassification.from_pretrained(place, "model.onnx")
    ORTOptimizer.from_pretrained(model).optimize(AutoOptimizationConfig.O1(), tmp_path / "b")
    config = AutoQuantizationConfig.avx2(is_static=False)
    ORTQuantizer.from_pretrained(model).quantize(config, tmp_path / "c")
    assert names(tmp_path / "b") == {"model_optimized.onnx", "config.json", "ort_config.json"}
    assert names(tmp_path / "c") == {"model_quantized.onnx", "config.json", "ort_config.json"}
    said = json.loads((tmp_path / "b" / "ort_config.json").read_text())
    assert said["opset"] is None  # as it was


@pytest.mark.parametrize(
    ("ask", "arguments"),
    [
        ("get_input_embeddings", ()),
        ("get_output_embeddings", ()),
        ("set_input_embeddings", (None,)),
        ("resize_token_embeddings", (70,)),
        ("num_parameters", ()),
        ("named_buffers", ()),
        ("load_state_dict", ({},)),
        ("gradient_checkpointing_enable", ()),
    ],
)
def test_what_belongs_to_weights_is_one_clear_error(ask: str, arguments: tuple[Any, ...]) -> None:
    for name in ("classes", "gpt2", "t5"):
        with pytest.raises(StateError, match=r"(?s)ORTModelFor.*constants.*ortrain\.ORTModule"):
            getattr(ort_model(name), ask)(*arguments)


def test_it_stays_in_its_precision_by_the_short_names_too() -> None:
    assert ort_model("classes").float() is ort_model("classes")
    with pytest.raises(NotServed, match=r"its file computes in torch\.float32"):
        ort_model("classes").half()


def test_what_has_no_task_says_so() -> None:
    with pytest.raises(TypeError, match=r"ORTModel is what models of all tasks are.*its task"):
        ORTModel.from_pretrained(folder("classes"))


@pytest.mark.parametrize("place", ["../secret", "weights/../../secret", "/tmp/secret"])
def test_weights_that_a_file_wants_from_elsewhere_are_not_copied(
    place: str, tmp_path: Path
) -> None:
    """onnxruntime looks at those alone that a node reads."""
    shutil.copytree(folder("classes"), tmp_path / "model")
    file = tmp_path / "model" / "model.onnx"
    model = onnx.load(file)
    outside = model.graph.initializer.add(
        name="outside", data_type=onnx.TensorProto.UINT8, dims=[1],
        data_location=onnx.TensorProto.EXTERNAL,
    )  # fmt: skip
    outside.external_data.add(key="location", value=place)
    file.write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match="leaves the folder of the model"):
        external_files(file)

"""Folders: what is loaded of them, saved to them, and told of what is wrong with them."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from transformers import CLIPConfig, CLIPForImageClassification

from ortrain.deploy.models import (
    ORTModelForCausalLM,
    ORTModelForFeatureExtraction,
    ORTModelForImageClassification,
    ORTModelForQuestionAnswering,
    ORTModelForSeq2SeqLM,
    ORTModelForSequenceClassification,
)
from ortrain.errors import InputError, NotServed, SaveError, StateError
from tests.deploy.exported import call, folder, ort_class, ort_model, torch_model


def a_copy(name: str, target: Path) -> Path:
    return Path(shutil.copytree(folder(name), target / name))


def classify(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(**call("classes", 2, 6)).logits
    return logits


def test_a_folder_a_file_and_a_folder_of_the_hub_load_alike(tmp_path: Path) -> None:
    expected = classify(ort_model("classes"))
    place = a_copy("classes", tmp_path)
    kind = ORTModelForSequenceClassification
    found = [kind.from_pretrained(place), kind.from_pretrained(str(place / "model.onnx"))]
    (place / "model.onnx").rename(place / "any name.onnx")
    found.append(kind.from_pretrained(place))
    (place / "onnx").mkdir()
    (place / "any name.onnx").rename(place / "onnx" / "model.onnx")
    found.append(kind.from_pretrained(place))
    found.append(kind.from_pretrained(place, file_name="model.onnx"))
    found.append(kind.from_pretrained(tmp_path, subfolder="classes"))
    for model in found:
        assert torch.equal(classify(model), expected)


def test_several_files_are_listed_and_one_is_chosen_by_name(tmp_path: Path) -> None:
    place = a_copy("classes", tmp_path)
    shutil.copy(place / "model.onnx", place / "model_quantized.onnx")
    kind = ORTModelForSequenceClassification
    with pytest.raises(
        InputError, match=r"(?s)2 ONNX files.*model\.onnx, model_quantized\.onnx.*file_n"
    ):
        kind.from_pretrained(place)
    model = kind.from_pretrained(place, "model_quantized.onnx")
    assert "model_quantized.onnx" in repr(model)
    with pytest.raises(InputError, match=r"(?s)no file 'other\.onnx'.*it has model\.onnx, model_q"):
        kind.from_pretrained(place, file_name="other.onnx")


def test_a_folder_without_a_file_or_a_config_is_told(tmp_path: Path) -> None:
    kind = ORTModelForSequenceClassification
    with pytest.raises(InputError, match=r"(?s)no ONNX file.*it is empty.*export=True"):
        kind.from_pretrained(tmp_path)
    place = a_copy("classes", tmp_path)
    (place / "config.json").unlink()
    with pytest.raises(InputError, match=r"no config\.json"):
        kind.from_pretrained(place)
    model = kind.from_pretrained(place, config=torch_model("classes").config)
    assert torch.equal(classify(model), classify(ort_model("classes")))
    (place / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"cannot read .*config\.json"):
        kind.from_pretrained(place)
    (place / "config.json").write_text(json.dumps({"model_type": "no such model"}))
    with pytest.raises(InputError, match=r"cannot read .*config\.json"):
        kind.from_pretrained(place)


def test_a_name_that_is_no_folder_is_looked_up_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="no folder 'some/model'"):
        ORTModelForSequenceClassification.from_pretrained("some/model", local_files_only=True)
    asked: list[Any] = []

    def download(name: str, **arguments: Any) -> str:
        asked.append((name, arguments.get("revision")))
        return str(folder("classes"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    model = ORTModelForSequenceClassification.from_pretrained("some/model", revision="v1")
    assert torch.equal(classify(model), classify(ort_model("classes")))
    assert asked == [("some/model", "v1")]


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    place = a_copy("classes", tmp_path)
    whole = (place / "model.onnx").read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"no protobuf at all", whole[100:]):
        (place / "model.onnx").write_bytes(content)
        with pytest.raises(
            InputError, match=r"(?s)cannot load model\.onnx.*because.*copy or\s+export"
        ):
            ORTModelForSequenceClassification.from_pretrained(place)


def test_weights_missing_beside_the_file_are_told(tmp_path: Path) -> None:
    place = a_copy("classes", tmp_path)
    model = onnx.load(place / "model.onnx")
    onnx.save(
        model,
        place / "model.onnx",
        save_as_external_data=True,
        location="model.onnx_data",
        size_threshold=200,
    )
    loaded = ORTModelForSequenceClassification.from_pretrained(place)
    assert torch.equal(classify(loaded), classify(ort_model("classes")))
    loaded.save_pretrained(tmp_path / "saved")
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert names == {"model.onnx", "model.onnx_data", "config.json"}
    again = ORTModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert torch.equal(classify(again), classify(ort_model("classes")))
    (place / "model.onnx_data").unlink()
    with pytest.raises(InputError, match=r"cannot load model\.onnx"):
        ORTModelForSequenceClassification.from_pretrained(place)


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        (ORTModelForQuestionAnswering, "classes", r"it gives logits of input_ids, attention_mask"),
        (ORTModelForFeatureExtraction, "classes", r"expected last_hidden_state or token_embedd"),
        (ORTModelForImageClassification, "classes", r"it takes input_ids.*expected pixel_values"),
        (ORTModelForSequenceClassification, "images", r"it takes pixel_values; expected input_ids"),
        (ORTModelForSequenceClassification, "features", r"it gives last_hidden_state"),
        (ORTModelForCausalLM, "features", r"it gives last_hidden_state"),
        (ORTModelForSeq2SeqLM, "classes", r"no encoder_model\.onnx"),
        (ORTModelForCausalLM, "t5", r"reads the states of an encoder|reads encoder_hidden_states"),
    ],
)
def test_a_file_of_another_task_is_told_with_what_it_takes_and_gives(
    kind: Any, name: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        kind.from_pretrained(folder(name))


def test_wrong_arguments_are_told_by_name() -> None:
    kind, place = ORTModelForSequenceClassification, folder("classes")
    with pytest.raises(ValueError, match=r"provider='NoProvider': the installed onnxruntime has"):
        kind.from_pretrained(place, provider="NoProvider")
    with pytest.raises(TypeError, match=r"session_options=\{\}"):
        kind.from_pretrained(place, session_options={})
    with pytest.raises(TypeError, match="provider_options="):
        kind.from_pretrained(place, provider_options=["a"])
    with pytest.raises(TypeError, match="no argument 'colour'"):
        kind.from_pretrained(place, colour=1)
    with pytest.raises(TypeError, match="model=3"):
        kind.from_pretrained(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="export="):
        kind.from_pretrained(place, export="yes")  # type: ignore[arg-type]


def test_options_of_the_session_and_of_the_configuration_are_taken() -> None:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    kind, place = ORTModelForSequenceClassification, folder("classes")
    model = kind.from_pretrained(place, session_options=options, id2label={0: "a", 1: "b"})
    assert model.config.id2label == {0: "a", 1: "b"}
    assert model.session.providers == ["CPUExecutionProvider"]
    torch.testing.assert_close(classify(model), classify(ort_model("classes")), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["classes", "gpt2", "t5"])
def test_a_saved_model_has_the_same_files(name: str, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder(name).iterdir()}
    target = tmp_path / "a" / "b"
    ort_model(name).save_pretrained(target)
    ort_model(name).save_pretrained(target)
    assert {path.name for path in target.iterdir()} == before.keys()
    for onnx_name in (n for n in before if n.endswith(".onnx")):
        assert (target / onnx_name).read_bytes() == before[onnx_name]
    again = ort_class(name).from_pretrained(target)
    known, kept = ort_model(name).config.to_dict(), again.config.to_dict()
    known.pop("_name_or_path"), kept.pop("_name_or_path")
    assert kept == known
    assert {path.name: path.read_bytes() for path in folder(name).iterdir()} == before


def test_a_model_is_not_saved_over_itself_or_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ort_model("classes")
    with pytest.raises(ValueError, match="was loaded from there"):
        model.save_pretrained(folder("classes"))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(SaveError, match="No space left"):
        model.save_pretrained(tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())


def test_a_model_is_neither_pickled_nor_copied() -> None:
    for ask in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(StateError, match="save_pretrained"):
            ask(ort_model("classes"))


# --- export -------------------------------------------------------------------------------------


def test_a_checkpoint_is_exported_where_it_is_asked_for(tmp_path: Path) -> None:
    source = torch_model("classes")
    source.save_pretrained(tmp_path / "checkpoint")
    before = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    model = ORTModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint", export=True)
    assert torch.equal(classify(model), classify(ort_model("classes")))
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == before
    made = model.folder
    model.save_pretrained(tmp_path / "exported")
    del model
    assert not made.exists()
    again = ORTModelForSequenceClassification.from_pretrained(tmp_path / "exported")
    assert torch.equal(classify(again), classify(ort_model("classes")))


def test_a_pytorch_model_is_exported_and_stays_as_it_is() -> None:
    source = copy.deepcopy(torch_model("classes")).train()
    model = ORTModelForSequenceClassification.from_pretrained(source)
    assert source.training
    assert torch.equal(classify(model), classify(ort_model("classes")))


def test_images_have_the_size_of_the_part_that_looks_at_them() -> None:
    """CLIP's configuration has it within that of its vision: images of 224 were tried."""
    sizes = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }  # fmt: skip
    text = {**sizes, "vocab_size": 60, "bos_token_id": 1, "eos_token_id": 2}
    vision = {**sizes, "image_size": 12, "patch_size": 4}
    config = CLIPConfig(text_config=text, vision_config=vision, num_labels=5)
    model = CLIPForImageClassification(config).eval()
    ours = ORTModelForImageClassification.from_pretrained(model, export=True)
    image = torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        expected = model(image).logits
    torch.testing.assert_close(ours(image).logits, expected, rtol=0, atol=1e-4)


def test_what_cannot_be_exported_is_told(tmp_path: Path) -> None:
    kind = ORTModelForSequenceClassification
    with pytest.raises(NotServed, match="Linear is no model of transformers"):
        kind.from_pretrained(torch.nn.Linear(2, 2))
    half = copy.deepcopy(torch_model("classes")).half()
    with pytest.raises(NotServed, match=r"(?s)in torch.float16.*model\.float"):
        kind.from_pretrained(half)
    with torch.device("meta"):
        elsewhere = type(half)(half.config)
    with pytest.raises(NotServed, match=r"(?s)is on meta.*ortrain\.ORTModule"):
        kind.from_pretrained(elsewhere)
    with pytest.raises(NotServed, match="has no encoder and decoder"):
        ORTModelForSeq2SeqLM.from_pretrained(torch_model("gpt2"))
    with pytest.raises(NotServed, match="has an encoder and a decoder"):
        ORTModelForCausalLM.from_pretrained(torch_model("t5"))
    with pytest.raises(InputError, match=r"no config\.json"):
        kind.from_pretrained(tmp_path, export=True)

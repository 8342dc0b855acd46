"""``ORTQuantizer``: where it reads and writes, folders of several files, data, large models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from ortrain.deploy.ort_config import ORTConfig
from ortrain.deploy.quantization import (
    AutoCalibrationConfig,
    AutoQuantizationConfig,
    HalfPrecisionConfig,
    ORTQuantizer,
    QuantizationConfig,
    WeightOnlyConfig,
)
from ortrain.errors import InputError, SaveError
from tests.deploy.quantization.models import (
    WORDS,
    Arrays,
    answers,
    checksums,
    classifier,
    exact,
    generator,
    ids,
    operators,
    relative,
    saved,
)

HEADS, SIZE = 2, 8
WIDTH = HEADS * SIZE


def dynamic(**more: Any) -> QuantizationConfig:
    return exact(AutoQuantizationConfig.avx512_vnni(is_static=False, **more))


def _attention(name: str, source: str, weights: Arrays) -> list[onnx.NodeProto]:
    """Nodes of keys and values ``[batch, heads, length, size]`` from ``source``."""
    rng = generator(len(name))
    nodes = []
    for part in ("key", "value"):
        weight = rng.standard_normal((WIDTH, WIDTH), dtype=np.float32) / 4
        weights[f"{name}_{part}"] = weight.astype(np.float32)
        nodes += [
            helper.make_node(
                "MatMul", [source, f"{name}_{part}"], [f"{name}_{part}_flat"], name=f"{name}_{part}"
            ),
            helper.make_node("Reshape", [f"{name}_{part}_flat", "split"], [f"{name}_{part}_heads"]),
            helper.make_node(
                "Transpose", [f"{name}_{part}_heads"], [f"{name}_{part}_new"], perm=[0, 2, 1, 3]
            ),
        ]
    return nodes


def decoder(folder: Path, *, past: bool, states: bool, name: str = "model.onnx") -> Path:
    """A layer of attention over a cache, and over an encoder's states, with a head of words."""
    rng = generator(7)
    weights: Arrays = {
        "table": rng.standard_normal((WORDS, WIDTH), dtype=np.float32),
        "query": rng.standard_normal((WIDTH, WIDTH), dtype=np.float32) / np.float32(4),
        "head": rng.standard_normal((WIDTH, WORDS), dtype=np.float32),
        "split": np.array([0, 0, HEADS, SIZE]),
        "join": np.array([0, 0, WIDTH]),
    }
    cache = ["batch", HEADS, "past", SIZE]
    inputs: dict[str, Any] = {"input_ids": (TensorProto.INT64, ["batch", "new"])}
    outputs = {"logits": TensorProto.FLOAT}
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["h"], name="embedding")]
    nodes += _attention("own", "h", weights)
    keys = {"key": "own_key_new", "value": "own_value_new"}
    prefix = "decoder." if states or name != "model.onnx" else ""
    for part, new in list(keys.items()):
        present = f"present.0.{prefix}{part}"
        outputs[present] = TensorProto.FLOAT
        if past:
            before = f"past_key_values.0.{prefix}{part}"
            inputs[before] = (TensorProto.FLOAT, cache)
            nodes.append(helper.make_node("Concat", [before, new], [present], axis=2))
        else:
            nodes.append(helper.make_node("Identity", [new], [present]))
        keys[part] = present
    nodes += [
        helper.make_node("MatMul", ["h", "query"], ["q_flat"], name="query"),
        helper.make_node("Reshape", ["q_flat", "split"], ["q_heads"]),
        helper.make_node("Transpose", ["q_heads"], ["q"], perm=[0, 2, 1, 3]),
    ]
    attended = []
    if states:
        inputs["encoder_hidden_states"] = (TensorProto.FLOAT, ["batch", "source", WIDTH])
        nodes += _attention("cross", "encoder_hidden_states", weights)
        cross = {"key": "cross_key_new", "value": "cross_value_new"}
        for part, new in list(cross.items()):
            outputs[f"present.0.encoder.{part}"] = TensorProto.FLOAT
            nodes.append(helper.make_node("Identity", [new], [f"present.0.encoder.{part}"]))
        attended.append(cross)
    elif name != "model.onnx":
        cross = {part: f"past_key_values.0.encoder.{part}" for part in ("key", "value")}
        inputs.update(
            {n: (TensorProto.FLOAT, ["batch", HEADS, "source", SIZE]) for n in cross.values()}
        )
        attended.append(cross)
    total = "h"
    for index, each in enumerate([keys, *attended]):
        end = f"_{index}"
        nodes += [
            helper.make_node("Transpose", [each["key"]], [f"k{end}"], perm=[0, 1, 3, 2]),
            helper.make_node("MatMul", ["q", f"k{end}"], [f"scores{end}"], name=f"scores{end}"),
            helper.make_node("Softmax", [f"scores{end}"], [f"shares{end}"], axis=-1),
            helper.make_node(
                "MatMul", [f"shares{end}", each["value"]], [f"mixed{end}"], name=f"mixed{end}"
            ),
            helper.make_node("Transpose", [f"mixed{end}"], [f"back{end}"], perm=[0, 2, 1, 3]),
            helper.make_node("Reshape", [f"back{end}", "join"], [f"flat{end}"]),
            helper.make_node("Add", [total, f"flat{end}"], [f"sum{end}"], name=f"sum{end}"),
        ]
        total = f"sum{end}"
    nodes.append(helper.make_node("MatMul", [total, "head"], ["logits"], name="head"))
    return saved(folder, nodes, inputs, outputs, weights, name=name)


def encoder(folder: Path) -> Path:
    rng = generator(3)
    weights: Arrays = {
        "table": rng.standard_normal((WORDS, WIDTH), dtype=np.float32),
        "w": rng.standard_normal((WIDTH, WIDTH), dtype=np.float32) / np.float32(4),
    }
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["h"], name="encoder_embedding"),
        helper.make_node("MatMul", ["h", "w"], ["last_hidden_state"], name="encoder_product"),
    ]
    inputs = {"input_ids": (TensorProto.INT64, ["batch", "source"])}
    outputs = {"last_hidden_state": TensorProto.FLOAT}
    return saved(folder, nodes, inputs, outputs, weights, name="encoder_model.onnx")


def pair(folder: Path) -> Path:
    encoder(folder)
    decoder(folder, past=False, states=True, name="decoder_model.onnx")
    decoder(folder, past=True, states=False, name="decoder_with_past_model.onnx")
    return folder


def cached(past: int = 3, new: int = 1, rows: int = 2) -> Arrays:
    rng = generator(5)
    shape = (rows, HEADS, past, SIZE)
    return {
        **ids(rows, new),
        "past_key_values.0.key": rng.standard_normal(shape, dtype=np.float32),
        "past_key_values.0.value": rng.standard_normal(shape, dtype=np.float32),
    }


@pytest.mark.parametrize("past", [0, 3])
def test_a_decoder_with_a_cache_answers_nearly_the_same(tmp_path: Path, past: int) -> None:
    before = decoder(tmp_path / "a", past=True, states=False)
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a")
    quantizer.quantize(dynamic(), tmp_path / "b")
    after = tmp_path / "b" / "model_quantized.onnx"
    assert operators(after)["MatMulInteger"] == 4
    for old, new in zip(answers(before, cached(past)), answers(after, cached(past)), strict=True):
        assert relative(old, new) < 0.03


def test_a_decoder_with_a_cache_is_calibrated_with_one_and_without(tmp_path: Path) -> None:
    before = decoder(tmp_path / "a", past=True, states=False)
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a")
    found = quantizer.fit([ids(4, 6)], AutoCalibrationConfig.minmax())
    # The cache that comes back has the keys of the tokens before.
    low, high = found["past_key_values.0.key"]
    assert low < 0 < high
    config = exact(AutoQuantizationConfig.avx512_vnni(is_static=True))
    quantizer.quantize(config, tmp_path / "b", calibration_tensors_range=found)
    after = tmp_path / "b" / "model_quantized.onnx"
    session = answers(before, {**ids(4, 5), **empty(4)})
    feeds = {
        "input_ids": ids(4, 6)["input_ids"][:, 5:],
        "past_key_values.0.key": session[1],
        "past_key_values.0.value": session[2],
    }
    assert relative(answers(before, feeds)[0], answers(after, feeds)[0]) < 0.1


def empty(rows: int) -> Arrays:
    none = np.zeros((rows, HEADS, 0, SIZE), np.float32)
    return {"past_key_values.0.key": none, "past_key_values.0.value": none}


def generated(folder: Path, suffix: str, rows: int = 2) -> list[np.ndarray]:
    """Logits of two steps of an encoder and its decoders."""
    source = ids(rows, 5, 4)
    states = answers(folder / f"encoder_model{suffix}.onnx", source)[0]
    first = ids(rows, 3, 5)
    found = answers(
        folder / f"decoder_model{suffix}.onnx", {**first, "encoder_hidden_states": states}
    )
    names = ("decoder.key", "decoder.value", "encoder.key", "encoder.value")
    past = {f"past_key_values.0.{n}": a for n, a in zip(names, found[1:], strict=True)}
    second = answers(folder / f"decoder_with_past_model{suffix}.onnx", {**ids(rows, 1, 6), **past})
    return [found[0], second[0]]


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (dynamic(), 0.05),
        (WeightOnlyConfig(bits=8, block_size=16), 0.02),
        (HalfPrecisionConfig(), 0.01),
    ],
    ids=["dynamic", "weights", "half"],
)
def test_an_encoder_and_its_decoders_are_quantized_in_one_call(
    tmp_path: Path, config: Any, limit: float
) -> None:
    pair(tmp_path / "a")
    sums = checksums(tmp_path / "a")
    ORTQuantizer.from_pretrained(tmp_path / "a").quantize(config, tmp_path / "b")
    names = {path.name for path in (tmp_path / "b").glob("*.onnx")}
    assert names == {
        "encoder_model_quantized.onnx",
        "decoder_model_quantized.onnx",
        "decoder_with_past_model_quantized.onnx",
    }
    before, after = generated(tmp_path / "a", ""), generated(tmp_path / "b", "_quantized")
    for old, new in zip(before, after, strict=True):
        assert 0 < relative(old, new) < limit
    assert checksums(tmp_path / "a") == sums


def test_an_encoder_and_its_decoders_are_calibrated_on_what_they_give_each_other(
    tmp_path: Path,
) -> None:
    pair(tmp_path / "a")
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a")
    data = [
        {"input_ids": ids(4, 5, s)["input_ids"], "labels": ids(4, 4, s + 20)["input_ids"]}
        for s in range(4)
    ]
    found = quantizer.fit(data, AutoCalibrationConfig.minmax())
    states = np.concatenate(
        [answers(tmp_path / "a" / "encoder_model.onnx", each)[0] for each in data]
    )
    wanted = (float(states.min()), float(states.max()))
    assert found["decoder_model.onnx/encoder_hidden_states"] == pytest.approx(wanted)
    assert found["encoder_model.onnx/last_hidden_state"] == pytest.approx(wanted)
    assert "decoder_with_past_model.onnx/past_key_values.0.encoder.key" in found
    config = exact(AutoQuantizationConfig.avx512_vnni(is_static=True))
    quantizer.quantize(config, tmp_path / "b", calibration_tensors_range=found)
    before, after = generated(tmp_path / "a", ""), generated(tmp_path / "b", "_quantized")
    for old, new in zip(before, after, strict=True):
        assert 0 < relative(old, new) < 0.15


def test_a_decoder_without_answers_in_the_data_is_an_error(tmp_path: Path) -> None:
    pair(tmp_path / "a")
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a")
    with pytest.raises(InputError, match="nothing that the decoder reads"):
        quantizer.fit([ids(2, 5)], AutoCalibrationConfig.minmax())


def test_nodes_of_one_file_may_be_excluded_in_a_folder_of_several(tmp_path: Path) -> None:
    pair(tmp_path / "a")
    config = dynamic(nodes_to_exclude=["encoder_product"])
    ORTQuantizer.from_pretrained(tmp_path / "a").quantize(config, tmp_path / "b")
    assert operators(tmp_path / "b" / "encoder_model_quantized.onnx")["MatMul"] == 1
    found = ORTConfig.from_pretrained(tmp_path / "b").quantization
    assert found["nodes_to_exclude"] == ["encoder_product"]


def test_one_file_of_several_can_be_chosen(tmp_path: Path) -> None:
    pair(tmp_path / "a")
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a", file_name="encoder_model.onnx")
    quantizer.quantize(dynamic(), tmp_path / "b", file_suffix=None)
    assert {path.name for path in (tmp_path / "b").glob("*.onnx")} == {"encoder_model.onnx"}


def test_a_folder_a_file_and_a_loaded_model_are_all_taken(tmp_path: Path) -> None:
    path = classifier(tmp_path / "a")

    class Loaded:
        folder = tmp_path / "a"

    for source in (tmp_path / "a", path, str(path), Loaded()):
        quantizer = ORTQuantizer.from_pretrained(source)
        assert quantizer.onnx_model_path == path
        assert quantizer.config == {"model_type": "bert"}


def test_a_folder_without_a_model_and_a_damaged_one_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no model at"):
        ORTQuantizer.from_pretrained(tmp_path / "none")
    (tmp_path / "a").mkdir()
    with pytest.raises(InputError, match="has no ONNX file"):
        ORTQuantizer.from_pretrained(tmp_path / "a")
    (tmp_path / "a" / "model.onnx").write_bytes(b"not a model at all")
    with pytest.raises(InputError, match="cannot be read as an ONNX model"):
        ORTQuantizer.from_pretrained(tmp_path / "a").quantize(dynamic(), tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_the_folder_of_the_source_is_no_target(tmp_path: Path) -> None:
    classifier(tmp_path / "a")
    sums = checksums(tmp_path / "a")
    with pytest.raises(ValueError, match="is the folder of the source"):
        ORTQuantizer.from_pretrained(tmp_path / "a").quantize(dynamic(), tmp_path / "a")
    assert checksums(tmp_path / "a") == sums


def test_a_failure_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair(tmp_path / "a")
    from ortrain.deploy.quantization import publication as module

    save = module.save_model
    saved_files: list[Path] = []

    def full(model: Any, path: Path, **more: Any) -> None:
        if saved_files:
            raise OSError(28, "No space left on device")
        saved_files.append(path)
        save(model, path, **more)

    monkeypatch.setattr(module, "save_model", full)
    with pytest.raises(SaveError, match="cannot save the quantized model"):
        ORTQuantizer.from_pretrained(tmp_path / "a").quantize(dynamic(), tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_wrong_argument_is_told_by_name(tmp_path: Path) -> None:
    classifier(tmp_path / "a")
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a")
    with pytest.raises(TypeError, match="quantization_config"):
        quantizer.quantize("avx2", tmp_path / "b")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_fail='ignore'"):
        quantizer.quantize(dynamic(), tmp_path / "b", on_fail="ignore")
    with pytest.raises(ValueError, match="give validate="):
        quantizer.quantize(dynamic(), tmp_path / "b", on_fail="recover")
    with pytest.raises(TypeError, match="model_or_path"):
        ORTQuantizer.from_pretrained(3)


def test_a_calibration_set_is_drawn_from_a_data_set_with_the_models_columns(
    tmp_path: Path,
) -> None:
    classifier(tmp_path / "a")
    data = tmp_path / "data"
    data.mkdir()
    lines = [json.dumps({"text": f"words {i}", "label": i % 2}) for i in range(20)]
    (data / "train.jsonl").write_text("\n".join(lines))
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a")

    def tokenize(batch: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": [[len(text), 1, 2] for text in batch["text"]]}

    found = quantizer.get_calibration_dataset(
        str(data), num_samples=8, dataset_split="train", preprocess_function=tokenize
    )
    assert found.column_names == ["input_ids"]
    assert len(found) == 8
    again = quantizer.get_calibration_dataset(
        str(data), num_samples=8, dataset_split="train", preprocess_function=tokenize
    )
    assert found["input_ids"][:] == again["input_ids"][:]
    assert quantizer.fit(found, AutoCalibrationConfig.minmax(found), batch_size=4)
    with pytest.raises(ValueError, match="give one as dataset_split"):
        quantizer.get_calibration_dataset(str(data), num_samples=8)


def test_columns_that_the_model_does_not_take_are_removed(tmp_path: Path) -> None:
    import datasets

    classifier(tmp_path / "a")
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a")
    table = datasets.Dataset.from_list([{"input_ids": [1], "label": 1, "text": "a"}])
    assert quantizer.clean_calibration_dataset(table).column_names == ["input_ids"]
    with pytest.raises(TypeError, match="dataset="):
        quantizer.clean_calibration_dataset([1])


def test_weights_go_beside_the_file_where_they_are_too_large_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ortrain.deploy.model_folder.EXTERNAL_ABOVE", 2000)
    monkeypatch.setattr("ortrain.deploy.model_folder._SMALL", 64)
    before = classifier(tmp_path / "a")
    model = onnx.load(before)
    onnx.save(model, before, save_as_external_data=True, location="model.onnx_data")
    sums = checksums(tmp_path / "a")
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a")
    found = quantizer.fit([ids()], AutoCalibrationConfig.percentiles())
    static = exact(AutoQuantizationConfig.avx512_vnni(is_static=True))
    for config, limit in ((dynamic(), 0.03), (static, 0.1), (WeightOnlyConfig(block_size=16), 0.2)):
        target = tmp_path / type(config).__name__ / str(config.is_static)
        quantizer.quantize(config, target, calibration_tensors_range=found)
        after = target / "model_quantized.onnx"
        assert (target / "model_quantized.onnx_data").exists()
        assert ORTConfig.from_pretrained(target).use_external_data_format
        assert relative(answers(before, ids())[0], answers(after, ids())[0]) < limit
    assert checksums(tmp_path / "a") == sums


def test_data_that_has_all_inputs_of_a_decoder_is_taken_as_it_is(tmp_path: Path) -> None:
    pair(tmp_path / "a")
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a", "decoder_model.onnx")
    states = generator(2).standard_normal((2, 5, WIDTH), dtype=np.float32)
    data = [{**ids(2, 3), "encoder_hidden_states": states}]
    found = quantizer.fit(data, AutoCalibrationConfig.minmax())
    assert found["encoder_hidden_states"] == (float(states.min()), float(states.max()))


def test_each_file_is_fed_what_it_sees_when_the_model_generates() -> None:
    from ortrain.deploy.quantization.chain import Chain
    from ortrain.deploy.quantization.inputs import Described

    whole, states = np.dtype(np.int64), np.dtype(np.float32)
    cache = Described(states, 4, ("batch", HEADS, "past", SIZE))
    words = Described(whole, 2, ("batch", "new"))
    files = {
        "encoder_model.onnx": {"input_ids": words, "attention_mask": words},
        "decoder_model.onnx": {
            "input_ids": words,
            "encoder_hidden_states": Described(states, 3, ("batch", "source", WIDTH)),
            "encoder_attention_mask": words,
        },
        "decoder_with_past_model.onnx": {
            "input_ids": words,
            "encoder_attention_mask": words,
            "past_key_values.0.decoder.key": cache,
            "past_key_values.0.encoder.key": cache,
        },
    }
    seen: dict[str, Arrays] = {}

    def runner(file: str) -> Any:
        def run(feeds: Arrays) -> Arrays:
            seen[file] = {name: feeds[name] for name in files[file]}
            if file == "encoder_model.onnx":
                return {"last_hidden_state": np.zeros((2, 5, WIDTH), np.float32)}
            length = feeds["input_ids"].shape[1]
            return {
                "present.0.decoder.key": np.zeros((2, HEADS, length, SIZE), np.float32),
                "present.0.encoder.key": np.zeros((2, HEADS, 5, SIZE), np.float32),
            }

        return run

    batch = {
        "input_ids": np.ones((2, 5), np.int64),
        "attention_mask": np.ones((2, 5), np.int64),
        "labels": np.array([[4, 5, 6, -100]] * 2),
    }
    Chain(files).run(batch, {file: runner(file) for file in files})
    assert list(seen) == [
        "encoder_model.onnx",
        "decoder_model.onnx",
        "decoder_with_past_model.onnx",
    ]
    assert seen["decoder_model.onnx"]["input_ids"].tolist() == [[4, 5, 6]] * 2
    assert seen["decoder_model.onnx"]["encoder_attention_mask"].shape == (2, 5)
    last = seen["decoder_with_past_model.onnx"]
    assert last["input_ids"].tolist() == [[0]] * 2
    assert last["past_key_values.0.decoder.key"].shape == (2, HEADS, 3, SIZE)
    assert last["past_key_values.0.encoder.key"].shape == (2, HEADS, 5, SIZE)


def test_a_decoder_reads_its_prompt_and_then_a_word_with_its_cache() -> None:
    from ortrain.deploy.quantization.chain import Chain
    from ortrain.deploy.quantization.inputs import Described

    whole = np.dtype(np.int64)
    inputs = {
        "input_ids": Described(whole, 2, ("batch", "new")),
        "attention_mask": Described(whole, 2, ("batch", "all")),
        "position_ids": Described(whole, 2, ("batch", "new")),
        "past_key_values.0.key": Described(np.dtype(np.float32), 4, ("batch", HEADS, "past", SIZE)),
    }
    seen: list[Arrays] = []

    def run(feeds: Arrays) -> Arrays:
        seen.append(feeds)
        before = feeds["past_key_values.0.key"].shape[2] + feeds["input_ids"].shape[1]
        return {"present.0.key": np.ones((1, HEADS, before, SIZE), np.float32)}

    batch = {"input_ids": np.array([[7, 8, 9]]), "attention_mask": np.array([[0, 1, 1]])}
    Chain({"model.onnx": inputs}).run(batch, {"model.onnx": run})
    first, second = seen
    assert first["input_ids"].tolist() == [[7, 8]]
    assert first["attention_mask"].tolist() == [[0, 1]]
    assert first["position_ids"].tolist() == [[0, 0]]
    assert first["past_key_values.0.key"].shape == (1, HEADS, 0, SIZE)
    assert second["input_ids"].tolist() == [[9]]
    assert second["attention_mask"].tolist() == [[0, 1, 1]]
    assert second["position_ids"].tolist() == [[1]]
    assert second["past_key_values.0.key"].shape == (1, HEADS, 2, SIZE)


def test_nodes_of_all_files_are_measured_and_held_to_budgets(tmp_path: Path) -> None:
    from ortrain.deploy import Budgets, EquivalenceError, GoldenSet

    pair(tmp_path / "a")
    batch = {**ids(2, 5), "decoder_input_ids": ids(2, 4, 9)["input_ids"]}
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a")
    found = quantizer.sensitivity(dynamic(), [batch])
    assert {each.file for each in found} == set(quantizer.files)
    assert all(each.mean > 0 for each in found)
    with pytest.raises(EquivalenceError, match="most sensitive"):
        quantizer.quantize(
            dynamic(),
            tmp_path / "b",
            validate=GoldenSet([batch]),
            budgets=Budgets(max_abs_diff=1e-6),
            on_fail="recover",
            max_excluded=1,
        )
    assert not (tmp_path / "b").exists()

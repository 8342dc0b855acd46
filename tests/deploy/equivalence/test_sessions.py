"""Models that read a cache or an encoder: what a golden set has not follows from what it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from ortrain.deploy import Budgets, EquivalenceReport, GoldenSet, compare
from ortrain.errors import InputError
from tests.deploy import classifiers

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
# The parser of graphs takes no dots.
DOTTED = {"past_in": "past_key_values.0.key", "present_out": "present.0.key"}
PAST = "float[batch, 1, past, 4] past_in"
IDS = "int64[batch, sequence] input_ids, int64[batch, total] attention_mask"
# A sum over all words so far, which the cache has of those before.
DECODER = (
    f"g ({IDS}, int64[batch, sequence] position_ids, {PAST}) =>"
    " (float[batch, sequence, 4] logits, float[batch, 1, total, 4] present_out) {\n"
    "    words = Gather(table, input_ids)\n"
    "    places = Gather(place, position_ids)\n"
    "    both = Add(words, places)\n"
    "    one = Constant<value_ints: ints = [1]>()\n"
    "    own = Unsqueeze(both, one)\n"
    "    present_out = Concat<axis: int = 2>(past_in, own)\n"
    "    sums = ReduceSum<keepdims: int = 0>(present_out, axes)\n"
    "    kept = Unsqueeze(sums, one)\n"
    "    logits = Add(both, kept)\n}"
)
ENCODER = (
    f"g ({IDS}) => (float[batch, sequence, 4] last_hidden_state) {{\n"
    "    last_hidden_state = Gather(table, input_ids)\n}"
)
READER = (
    "g (int64[batch, length] input_ids, int64[batch, sequence] encoder_attention_mask,"
    " float[batch, sequence, 4] encoder_hidden_states) => (float[batch, length, 4] logits) {\n"
    "    words = Gather(table, input_ids)\n"
    "    one = Constant<value_ints: ints = [1]>()\n"
    "    two = Constant<value_ints: ints = [2]>()\n"
    "    number = Cast<to: int = 1>(encoder_attention_mask)\n"
    "    mask = Unsqueeze(number, two)\n"
    "    seen = Mul(encoder_hidden_states, mask)\n"
    "    context = ReduceSum<keepdims: int = 1>(seen, one)\n"
    "    logits = Add(words, context)\n}"
)
QUICK: dict[str, Any] = {"latency_runs": 0, "memory": False}


def model(text: str, **changes: Any) -> onnx.ModelProto:
    noise = np.random.default_rng(0)
    made = onnx.parser.parse_model(HEAD + text)
    tensors = {
        "table": noise.standard_normal((8, 4)).astype(np.float32),
        "place": noise.standard_normal((16, 4)).astype(np.float32),
        "axes": np.array([1, 2]),
        **changes,
    }
    used = {name for node in made.graph.node for name in node.input}
    for value in (*made.graph.input, *made.graph.output):
        value.name = DOTTED.get(value.name, value.name)
    for node in made.graph.node:
        for names in (node.input, node.output):
            names[:] = [DOTTED.get(name, name) for name in names]
    made.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name)
        for name, value in tensors.items()
        if name in used
    )
    return made


def texts(**more: np.ndarray) -> list[dict[str, np.ndarray]]:
    ids = np.array([[1, 2, 3], [4, 5, 0]])
    return [{"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64), **more}]


def decoders(tmp_path: Path, after: onnx.ModelProto, golden: GoldenSet) -> EquivalenceReport:
    config = {"architectures": ["GPT2LMHeadModel"]}
    old = classifiers.folder(tmp_path / "before", model(DECODER), config=config)
    new = classifiers.folder(tmp_path / "after", after, config=config)
    return compare(old, new, golden, Budgets(max_abs_diff=1e-6), **QUICK)


def test_a_decoder_is_run_with_an_empty_cache_and_with_a_full_one(tmp_path: Path) -> None:
    report = decoders(tmp_path, model(DECODER), GoldenSet(texts()))
    assert report.passed
    assert report.task == "causal-lm"
    assert set(report.outputs) == {
        "logits",
        "present.0.key",
        "logits with its cache",
        "present.0.key with its cache",
    }
    assert report.outputs["present.0.key with its cache"].elements == 2 * 4 * 4
    assert any("past_key_values.0.key, position_ids" in note for note in report.notes)


def test_what_only_a_full_cache_shows_is_found(tmp_path: Path) -> None:
    # Forgets the cache, which is empty in the first step.
    forgetful = model(DECODER)
    forgetful.graph.node[6].input[0] = "own"
    report = decoders(tmp_path, forgetful, GoldenSet(texts()))
    assert report.outputs["logits"].largest == 0
    assert report.outputs["logits with its cache"].largest > 0.1
    (reason,) = report.reasons
    assert "output logits with its cache differs by" in reason


def test_padding_of_a_decoder_is_left_out_though_its_mask_covers_a_cache_too(
    tmp_path: Path,
) -> None:
    report = decoders(tmp_path, model(DECODER), GoldenSet(texts()))
    assert report.outputs["logits"].elements == 5 * 4
    assert report.overall.count == 3  # tokens behind which there is another one
    assert report.outputs["logits with its cache"].elements == 2 * 4


def test_positions_follow_from_the_mask(tmp_path: Path) -> None:
    # The position of a text that is padded at its beginning counts from its first word.
    ids = np.array([[0, 0, 1]])
    golden = GoldenSet([{"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64)}])
    place = np.zeros((16, 4), np.float32)
    place[1:] = 7  # a difference at all positions but the first
    given = model(DECODER, place=np.zeros((16, 4), np.float32))
    config = {"architectures": ["GPT2LMHeadModel"]}
    old = classifiers.folder(tmp_path / "before", given, config=config)
    new = classifiers.folder(tmp_path / "after", model(DECODER, place=place), config=config)
    report = compare(old, new, golden, **QUICK)
    assert report.outputs["logits"].largest == 0
    assert report.outputs["logits with its cache"].largest == pytest.approx(14)


def test_an_encoder_and_its_decoder_are_compared_in_one_call(tmp_path: Path) -> None:
    config = {"architectures": ["T5ForConditionalGeneration"]}
    table = np.asarray(
        numpy_helper.to_array(next(t for t in model(ENCODER).graph.initializer)), np.float32
    )
    folders = []
    for name, changed in (("before", table), ("after", table + np.float32(0.5))):
        folder = classifiers.folder(
            tmp_path / name, model(ENCODER, table=changed), name="encoder_model.onnx", config=config
        )
        folders.append(
            classifiers.folder(folder, model(READER), name="decoder_model.onnx", config=config)
        )
    golden = GoldenSet(
        texts(decoder_input_ids=np.array([[1, 2], [3, 4]])), np.array([[1, 2], [3, -100]])
    )
    report = compare(*folders, golden, **QUICK)
    assert report.task == "seq2seq-lm"
    assert set(report.outputs) == {"encoder_model/last_hidden_state", "decoder_model/logits"}
    assert report.outputs["encoder_model/last_hidden_state"].largest == pytest.approx(0.5)
    # The decoder of each side reads from the encoder of its side: three words of 0.5.
    assert report.outputs["decoder_model/logits"].largest == pytest.approx(1.5, rel=1e-5)
    assert set(report.after.files) == {"encoder_model.onnx", "decoder_model.onnx"}
    assert report.overall.count == 3


def test_a_decoder_in_two_files_goes_on_where_the_first_one_ends(tmp_path: Path) -> None:
    config = {"architectures": ["GPT2LMHeadModel"]}
    first = model(DECODER)
    del first.graph.input[3]
    first.graph.node[5].CopyFrom(onnx.helper.make_node("Identity", ["own"], ["present.0.key"]))
    names = {"decoder_model.onnx": first, "decoder_with_past_model.onnx": model(DECODER)}
    folders = [tmp_path / "before", tmp_path / "after"]
    for folder in folders:
        for name, each in names.items():
            classifiers.folder(folder, each, name=name, config=config)
    report = compare(*folders, GoldenSet(texts()), **QUICK)
    assert report.passed
    # Three tokens before, and one more.
    assert report.outputs["decoder_model/present.0.key"].elements == 2 * 3 * 4
    assert report.outputs["decoder_with_past_model/present.0.key"].elements == 2 * 4 * 4


def test_an_input_that_nothing_gives_is_told(tmp_path: Path) -> None:
    folder = classifiers.folder(tmp_path, model(READER), config={})
    with pytest.raises(InputError, match="no input 'encoder_attention_mask'"):
        compare(folder, folder, GoldenSet([{"input_ids": np.ones((1, 2), np.int64)}]), **QUICK)

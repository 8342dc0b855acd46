"""Folders as other exporters write them: with a switch, with two decoders, without positions."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from ortrain.deploy import export_onnx
from ortrain.deploy.models import ORTModelForCausalLM, ORTModelForSeq2SeqLM
from ortrain.errors import InputError, UnsupportedInput
from tests.deploy.decoders import batch
from tests.deploy.exported import folder, ort_model, torch_model

NEW = 6


def tokens(model: Any, name: str, **more: Any) -> torch.Tensor:
    found: torch.Tensor = model.generate(
        **batch(torch_model(name), 3, 6), max_new_tokens=NEW, **more
    )
    return found


def copied(name: str, target: Path) -> Path:
    return Path(shutil.copytree(folder(name), target))


def merged(first: onnx.ModelProto, after: onnx.ModelProto) -> onnx.ModelProto:
    """One file with a switch, as Optimum's exporter made: two graphs in the branches of an If."""
    outputs = [value.name for value in first.graph.output]
    branches = [branch(model.graph, f"{i}.", outputs) for i, model in enumerate((first, after))]
    inputs = {value.name: value for value in (*first.graph.input, *after.graph.input)}
    switch = helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1])
    nodes = [
        helper.make_node("Squeeze", ["use_cache_branch"], ["switch"]),
        helper.make_node(
            "If", ["switch"], outputs, then_branch=branches[1], else_branch=branches[0]
        ),
    ]
    graph = helper.make_graph(nodes, "merged", [*inputs.values(), switch], first.graph.output)
    return helper.make_model(graph, opset_imports=first.opset_import, ir_version=first.ir_version)


def branch(graph: onnx.GraphProto, prefix: str, outputs: list[str]) -> onnx.GraphProto:
    """A graph that reads the inputs from outside, and gives nothing for what it does not have."""
    outer = {value.name for value in graph.input}
    inner = {value.name for value in graph.initializer}
    inner |= {name for node in graph.node for name in node.output}
    nodes, initializers = [], []
    for tensor in graph.initializer:
        initializers.append(onnx.TensorProto.FromString(tensor.SerializeToString()))
        initializers[-1].name = prefix + tensor.name
    for node in graph.node:
        nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
        for names in (nodes[-1].input, nodes[-1].output):
            names[:] = [n if n in outer or not n else prefix + n for n in names]
    given = []
    for name in outputs:
        given.append(helper.make_tensor_value_info(f"{prefix}{name}", TensorProto.FLOAT, None))
        if name not in inner:  # the encoder's states, which stay as they are
            empty = helper.make_tensor("", TensorProto.FLOAT, [0, 2, 1, 8], [])
            nodes.append(helper.make_node("Constant", [], [given[-1].name], value=empty))
    return helper.make_graph(nodes, f"branch {prefix}", [], given, initializers)


@pytest.mark.parametrize("search", [{}, {"num_beams": 3}, {"use_cache": False}])
def test_an_encoder_and_a_decoder_with_a_switch(tmp_path: Path, search: dict[str, Any]) -> None:
    place = copied("t5", tmp_path / "t5")
    names = ("decoder_model.onnx", "decoder_with_past_model.onnx")
    joined = merged(*(onnx.load(place / name) for name in names))
    onnx.save(joined, place / "decoder_model_merged.onnx")
    for name in names:
        (place / name).unlink()
    model = ORTModelForSeq2SeqLM.from_pretrained(place)
    assert [session.path.name for session in model.sessions.values()] == [
        "encoder_model.onnx",
        "decoder_model_merged.onnx",
    ]
    assert torch.equal(tokens(model, "t5", **search), tokens(torch_model("t5"), "t5", **search))


def test_a_decoder_without_a_second_file_reads_all_tokens_anew(tmp_path: Path) -> None:
    place = copied("t5", tmp_path / "t5")
    (place / "decoder_with_past_model.onnx").unlink()
    model = ORTModelForSeq2SeqLM.from_pretrained(place)
    assert torch.equal(tokens(model, "t5"), tokens(torch_model("t5"), "t5"))
    given = {**batch(torch_model("t5"), 2, 5), "decoder_input_ids": torch.tensor([[0], [0]])}
    past = model(**given).past_key_values
    with pytest.raises(InputError, match=r"decoder_model\.onnx cannot go on from a cache"):
        model(**given, past_key_values=past)


def test_files_of_an_encoder_and_a_decoder_are_chosen_by_name(tmp_path: Path) -> None:
    place = copied("t5", tmp_path / "t5")
    shutil.copy(place / "encoder_model.onnx", place / "encoder_model_quantized.onnx")
    with pytest.raises(
        InputError, match=r"(?s)2 ONNX files for the encoder_model.*encoder_file_na"
    ):
        ORTModelForSeq2SeqLM.from_pretrained(place)
    with pytest.raises(TypeError, match="encoder_file_name="):
        ORTModelForSeq2SeqLM.from_pretrained(place, file_name="encoder_model.onnx")
    model = ORTModelForSeq2SeqLM.from_pretrained(
        place, encoder_file_name="encoder_model_quantized.onnx"
    )
    assert torch.equal(tokens(model, "t5"), tokens(torch_model("t5"), "t5"))


def edited(name: str, target: Path, edit: Callable[[onnx.ModelProto], None]) -> Path:
    place = copied(name, target)
    model = onnx.load(place / "model.onnx")
    edit(model)
    onnx.save(model, place / "model.onnx")
    return place


def test_a_decoder_of_two_files(tmp_path: Path) -> None:
    place = copied("gpt2", tmp_path / "gpt2")
    whole = onnx.load(place / "model.onnx")
    (place / "model.onnx").rename(place / "decoder_with_past_model.onnx")
    # The first takes no cache: its inputs become constants without tokens.
    past = [v for v in whole.graph.input if v.name.startswith("past_key_values")]
    rows = "rows_of_no_tokens"
    made = [helper.make_node("Shape", ["input_ids"], [rows], start=0, end=1)]
    sizes = [helper.make_tensor("sizes_of_no_tokens", TensorProto.INT64, [3], [2, 0, 8])]
    shape = "shape_of_no_tokens"
    made.append(helper.make_node("Concat", [rows, "sizes_of_no_tokens"], [shape], axis=0))
    for value in past:
        whole.graph.input.remove(value)
        made.append(helper.make_node("ConstantOfShape", [shape], [value.name]))
    nodes = [*made, *whole.graph.node]
    del whole.graph.node[:]
    whole.graph.node.extend(nodes)
    whole.graph.initializer.extend(sizes)
    onnx.save(whole, place / "decoder_model.onnx")
    model = ORTModelForCausalLM.from_pretrained(place)
    assert len(model.sessions) == 2
    for search in ({}, {"num_beams": 3}, {"use_cache": False}):
        expected = tokens(torch_model("gpt2"), "gpt2", **search)
        assert torch.equal(tokens(model, "gpt2", **search), expected)


def test_a_decoder_without_a_cache_reads_all_tokens_anew(tmp_path: Path) -> None:
    source = torch_model("llama")
    given = batch(source, 2, 6)
    export_onnx(source, [given, batch(source, 1, 4)], tmp_path / "model.onnx")
    source.config.save_pretrained(tmp_path)
    model = ORTModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(tokens(model, "llama"), tokens(source, "llama"))
    found = model(**given)
    assert found.past_key_values is None
    past = ort_model("llama")(**given).past_key_values
    with pytest.raises(InputError, match=r"model\.onnx takes no cache"):
        model(given["input_ids"], past_key_values=past)


def test_positions_that_a_file_does_not_take_are_refused_where_they_are_others(
    tmp_path: Path,
) -> None:
    def counted(model: onnx.ModelProto) -> None:
        """Positions are counted in the file, as where nothing is padded."""
        value = next(v for v in model.graph.input if v.name == "position_ids")
        model.graph.input.remove(value)
        constants = {"zero": 0, "one": 1}
        for name, number in constants.items():
            model.graph.initializer.append(
                helper.make_tensor(f"counted.{name}", TensorProto.INT64, [], [number])
            )
        model.graph.initializer.append(
            helper.make_tensor("counted.axis", TensorProto.INT64, [1], [0])
        )
        past = next(v.name for v in model.graph.input if v.name.startswith("past_key_values"))
        parts = [
            helper.make_node("Shape", ["input_ids"], ["counted.shape"]),
            helper.make_node("Gather", ["counted.shape", "counted.one"], ["counted.new"]),
            helper.make_node("Shape", [past], ["counted.past"], start=2, end=3),
            helper.make_node("Squeeze", ["counted.past"], ["counted.before"]),
            helper.make_node("Add", ["counted.before", "counted.new"], ["counted.end"]),
            helper.make_node(
                "Range", ["counted.before", "counted.end", "counted.one"], ["counted.range"]
            ),
            helper.make_node("Unsqueeze", ["counted.range", "counted.axis"], ["counted.row"]),
            helper.make_node("Expand", ["counted.row", "counted.shape"], ["position_ids"]),
        ]
        nodes = [*parts, *model.graph.node]
        del model.graph.node[:]
        model.graph.node.extend(nodes)

    plain = batch(torch_model("gpt2"), 2, 6, padded=False)
    padded = batch(torch_model("gpt2"), 2, 6)
    model = ORTModelForCausalLM.from_pretrained(edited("gpt2", tmp_path / "gpt2", counted))
    found = model.generate(**plain, max_new_tokens=NEW)
    assert torch.equal(found, torch_model("gpt2").generate(**plain, max_new_tokens=NEW))
    with pytest.raises(UnsupportedInput, match="takes no position_ids, and they do not count"):
        model.generate(**padded, max_new_tokens=NEW)
    # The distance of two tokens, which is all that a Llama reads, is the same in a padded row.
    model = ORTModelForCausalLM.from_pretrained(edited("llama", tmp_path / "llama", counted))
    padded = batch(torch_model("llama"), 2, 6)
    found = model.generate(**padded, max_new_tokens=NEW)
    assert torch.equal(found, torch_model("llama").generate(**padded, max_new_tokens=NEW))
    with pytest.raises(UnsupportedInput, match="takes no position_ids, and they do not count"):
        model(padded["input_ids"], position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))


def test_a_cache_of_another_form_is_told(tmp_path: Path) -> None:
    def renamed(model: onnx.ModelProto) -> None:
        for value in model.graph.output:
            if value.name == "present.1.value":
                model.graph.node.append(
                    helper.make_node("Identity", [value.name], ["present.1.both"])
                )
                value.name = "present.1.both"

    place = edited("gpt2", tmp_path / "gpt2", renamed)
    with pytest.raises(InputError, match=r"a cache of another form: present\.1\.both"):
        ORTModelForCausalLM.from_pretrained(place)

"""Generation after an optimizer and a quantizer: the tokens that the files gave before."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor

from ortrain.deploy import (
    AutoOptimizationConfig,
    AutoQuantizationConfig,
    Budgets,
    GoldenSet,
    ORTOptimizer,
    ORTQuantizer,
)
from tests.breadth import sampled
from tests.deploy.exported import folder, ort_class, ort_model, torch_model
from tests.deploy.models.test_generate import NEW, prompt
from tests.deploy.optimization.graphs import operators

ATTENTION = ("Attention", "MultiHeadAttention", "GroupQueryAttention")
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 4, "length_penalty": 2.0},
    "sampling": {"do_sample": True, "num_return_sequences": 2, "temperature": 1.5},
}
# Attentions of each file: two layers, of an encoder one where it has no more.
FILES = {
    "gpt2": {"model.onnx": 2},
    "llama": {"model.onnx": 2},
    "t5": {"encoder_model.onnx": 2, "decoder_model.onnx": 4, "decoder_with_past_model.onnx": 4},
    "bart": {"encoder_model.onnx": 1, "decoder_model.onnx": 4, "decoder_with_past_model.onnx": 4},
}
CASES = [f"{name} {level}" for name in FILES for level in ("O1", "O2", "O3")]
SAMPLE = ["gpt2 O1", "gpt2 O2", "gpt2 O3", "llama O2", "t5 O2", "bart O2"]


@functools.cache
def _folder(name: str, level: str) -> Path:
    target = folder(name).parent / f"{name}-{level}"
    config = AutoOptimizationConfig.with_optimization_level(level)
    ORTOptimizer.from_pretrained(folder(name)).optimize(config, target, file_suffix=None)
    return target


def tokens(model: Any, search: str, **given: Tensor) -> Tensor:
    torch.manual_seed(7)
    return model.generate(**given, max_new_tokens=NEW, **SEARCHES[search])


@pytest.mark.parametrize("case", sampled(CASES, SAMPLE))
def test_an_optimized_model_writes_the_tokens_that_it_did(case: str) -> None:
    name, level = case.split()
    path = _folder(name, level)
    optimized = ort_class(name).from_pretrained(path)
    for search in SEARCHES:
        for rows, length in ((4, 6), (1, 3)):
            given = prompt(name, rows, length)
            found, before, of_pytorch = (
                tokens(model, search, **given)
                for model in (optimized, ort_model(name), torch_model(name))
            )
            assert torch.equal(found, before)
            assert torch.equal(found, of_pytorch)


@pytest.mark.parametrize("name", sampled(FILES, ["gpt2", "t5"]))
def test_each_attention_of_each_file_is_one_node(name: str) -> None:
    path = _folder(name, "O2")
    for file, expected in FILES[name].items():
        counts = operators(ir.load(path / file))
        assert (file, sum(counts[kind] for kind in ATTENTION)) == (file, expected)
        assert not counts["Softmax"]


def test_a_loaded_model_is_optimized_as_its_folder_is(tmp_path: Path) -> None:
    model = ort_model("gpt2")
    ORTOptimizer.from_pretrained(model).optimize(AutoOptimizationConfig.O2(), tmp_path / "a")
    optimized = ort_class("gpt2").from_pretrained(tmp_path / "a")
    assert optimized.sessions["model"].path.name == "model_optimized.onnx"
    given = prompt("gpt2", 3, 5)
    assert torch.equal(tokens(optimized, "greedy", **given), tokens(model, "greedy", **given))


@pytest.mark.parametrize("name", sampled(FILES, ["gpt2", "t5"]))
def test_a_quantized_model_writes_tokens_and_was_compared(tmp_path: Path, name: str) -> None:
    given = prompt(name, 4, 6)
    batch = {key: value.numpy() for key, value in given.items()}
    if name in ("t5", "bart"):
        batch["decoder_input_ids"] = np.asarray([[0, 3], [0, 4], [0, 5], [0, 6]], np.int64)
    config = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=False)
    ORTQuantizer.from_pretrained(folder(name)).quantize(
        config, tmp_path / "a", validate=GoldenSet([batch]), budgets=Budgets(max_abs_diff=1e3)
    )
    model = ort_class(name).from_pretrained(tmp_path / "a")
    assert all(path.stem.endswith("_quantized") for path in (tmp_path / "a").glob("*.onnx"))
    for search in SEARCHES:
        found = tokens(model, search, **given)
        assert found.shape[0] == (8 if search == "sampling" else 4)
        assert int(found.min()) >= 0
        assert int(found.max()) < model.config.vocab_size
    report = json.loads((tmp_path / "a" / "equivalence.json").read_text(encoding="utf-8"))
    assert report["passed"]
    assert report["examples"] == 4
    assert all(0 < output["largest"] < 1e3 for output in report["outputs"].values())

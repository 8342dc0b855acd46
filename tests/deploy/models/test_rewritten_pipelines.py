"""Pipelines of transformers with optimized and quantized folders, beside PyTorch's model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Wav2Vec2FeatureExtractor, pipeline

from ortrain.deploy import (
    AutoOptimizationConfig,
    AutoQuantizationConfig,
    ORTOptimizer,
    ORTQuantizer,
)
from tests.breadth import crossed
from tests.deploy.exported import folder, ort_class, torch_model
from tests.deploy.models.test_pipelines import SOUND, TEXTS, assert_close, tokenizer

GREEDY = {"max_new_tokens": 6, "do_sample": False}
# Task, model, what it is called with, and the pipeline's parts.
CALLS: dict[str, tuple[str, str, Any, dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "classes": ("text-classification", "classes", TEXTS, {"top_k": 3, "batch_size": 3},
                lambda: {"tokenizer": tokenizer()}),
    "tokens": ("token-classification", "tokens", TEXTS, {}, lambda: {"tokenizer": tokenizer()}),
    "masked": ("fill-mask", "masked", "word7 [MASK] word30", {},
               lambda: {"tokenizer": tokenizer()}),
    "features": ("feature-extraction", "features", TEXTS, {}, lambda: {"tokenizer": tokenizer()}),
    "gpt2": ("text-generation", "gpt2", TEXTS, GREEDY | {"batch_size": 3},
             lambda: {"tokenizer": tokenizer(closed=False)}),
    "llama": ("text-generation", "llama", TEXTS, GREEDY | {"batch_size": 3},
              lambda: {"tokenizer": tokenizer(closed=False)}),
    "sounds": ("audio-classification", "sounds", SOUND, {"top_k": 3},
               lambda: {"feature_extractor": Wav2Vec2FeatureExtractor(return_attention_mask=True)}),
}  # fmt: skip


@functools.cache
def rewritten(name: str, how: str) -> Path:
    target = folder(name).parent / f"{name} {how}"
    if how == "int8":
        config = AutoQuantizationConfig.avx2(is_static=False)
        ORTQuantizer.from_pretrained(folder(name)).quantize(config, target)
    else:
        config = AutoOptimizationConfig.with_optimization_level(how)
        ORTOptimizer.from_pretrained(folder(name)).optimize(config, target)
    return target


def answer(model: Any, call: str) -> Any:
    task, _, inputs, of, parts = CALLS[call]
    torch.manual_seed(3)
    return pipeline(task, model=model, **parts())(inputs, **of)


def shape(answer: Any) -> Any:
    """What an answer is made of: the names in it, and how many there are of each."""
    if isinstance(answer, dict):
        return sorted(answer)
    return [shape(each) for each in answer] if isinstance(answer, list) else type(answer).__name__


@pytest.mark.parametrize(("call", "how"), crossed(CALLS, ["O2", "O3", "int8"], one_in=3))
@pytest.mark.filterwarnings("ignore:.*nodes were to be quantized and stay")
def test_a_rewritten_folder_answers_in_a_pipeline_as_pytorch_does(call: str, how: str) -> None:
    name = CALLS[call][1]
    model = ort_class(name).from_pretrained(rewritten(name, how))
    found, expected = answer(model, call), answer(torch_model(name), call)
    assert shape(found) == shape(expected)
    if how == "O2":
        assert_close(found, expected)

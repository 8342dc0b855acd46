"""Small models of each task, each exported once in a run of the tests."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    BertConfig,
    DistilBertConfig,
    RobertaConfig,
    ViTConfig,
    Wav2Vec2Config,
)

from ortrain.deploy import models
from ortrain.deploy.models import export_folder
from tests.deploy import decoders

WORDS = 60
_SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
    "num_labels": 5,
}
_VIT = {
    **{n: _SMALL[n] for n in ("hidden_size", "num_hidden_layers", "num_attention_heads")},
    "intermediate_size": 32,
    "image_size": 12,
    "patch_size": 4,
    "num_labels": 5,
}
_WAV2VEC2 = {
    **{n: v for n, v in _SMALL.items() if n not in ("vocab_size", "max_position_embeddings")},
    "vocab_size": 12,
    "conv_dim": (8, 8),
    "conv_kernel": (5, 3),
    "conv_stride": (3, 2),
    "num_feat_extract_layers": 2,
    "feat_extract_norm": "layer",
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
    "pad_token_id": 0,
}


def _bert(**more: Any) -> BertConfig:
    return BertConfig(**{**_SMALL, **more})


def _distilbert() -> DistilBertConfig:
    sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "num_labels": 4}
    return DistilBertConfig(vocab_size=WORDS, max_position_embeddings=40, **sizes)


def _roberta() -> RobertaConfig:
    return RobertaConfig(**_SMALL, type_vocab_size=1, pad_token_id=1)


# Name of a model → its class in transformers, its configuration, and what loads its file.
ONE_FILE: dict[str, tuple[str, Callable[[], Any], str]] = {
    "features": ("BertModel", _bert, "ORTModelForFeatureExtraction"),
    "classes": ("BertForSequenceClassification", _bert, "ORTModelForSequenceClassification"),
    "masked": ("BertForMaskedLM", _bert, "ORTModelForMaskedLM"),
    "tokens": (
        "DistilBertForTokenClassification",
        _distilbert,
        "ORTModelForTokenClassification",
    ),
    "answers": (
        "BertForQuestionAnswering",
        lambda: _bert(num_labels=2),
        "ORTModelForQuestionAnswering",
    ),
    "choices": ("RobertaForMultipleChoice", _roberta, "ORTModelForMultipleChoice"),
    "images": (
        "ViTForImageClassification",
        lambda: ViTConfig(**_VIT),
        "ORTModelForImageClassification",
    ),
    "sounds": (
        "Wav2Vec2ForSequenceClassification",
        lambda: Wav2Vec2Config(**_WAV2VEC2),
        "ORTModelForAudioClassification",
    ),
    "letters": ("Wav2Vec2ForCTC", lambda: Wav2Vec2Config(**_WAV2VEC2), "ORTModelForCTC"),
}
GENERATING: dict[str, tuple[Callable[[], Any], str]] = {
    "gpt2": (decoders.gpt2, "ORTModelForCausalLM"),
    "llama": (decoders.llama, "ORTModelForCausalLM"),
    "t5": (decoders.t5, "ORTModelForSeq2SeqLM"),
    "bart": (decoders.bart, "ORTModelForSeq2SeqLM"),
    "whisper": (decoders.whisper, "ORTModelForSpeechSeq2Seq"),
}


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@functools.cache
def torch_model(name: str) -> Any:
    """The PyTorch model, in evaluation mode; tests leave it as it is."""
    if name in GENERATING:
        return GENERATING[name][0]()
    kind, config, _ = ONE_FILE[name]
    torch.manual_seed(len(name))
    model = getattr(transformers, kind)(config()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    return model


def ort_class(name: str) -> Any:
    table = GENERATING if name in GENERATING else ONE_FILE
    return getattr(models, table[name][-1])


@functools.cache
def folder(name: str) -> Path:
    """The exported files; tests leave them as they are."""
    path = _root() / name
    export_folder(torch_model(name), path, ort_class(name).form)
    return path


@functools.cache
def ort_model(name: str) -> Any:
    return ort_class(name).from_pretrained(folder(name))


def call(name: str, rows: int, length: int) -> dict[str, Tensor]:
    """Arguments of a call of a model of one file; the first of several rows is padded."""
    generator = torch.Generator().manual_seed(10 * rows + length)
    if name == "images":
        return {"pixel_values": torch.randn(rows, 3, 12, 12, generator=generator)}
    if name in ("sounds", "letters"):
        values = torch.randn(rows, 40 + 7 * length, generator=generator)
        mask = torch.ones(values.shape, dtype=torch.int64)
        if rows > 1:
            mask[0, -20:] = 0
            values[0, -20:] = 0
        return {"input_values": values, "attention_mask": mask}
    shape = (rows, 4, length) if name == "choices" else (rows, length)
    ids = torch.randint(3, WORDS, shape, generator=generator)
    mask = torch.ones_like(ids)
    if rows > 1 and length > 2:
        mask[0, ..., -2:] = 0
        ids[0, ..., -2:] = torch_model(name).config.pad_token_id
    given = {"input_ids": ids, "attention_mask": mask}
    if name in ("features", "classes", "masked", "answers"):
        given["token_type_ids"] = torch.randint(2, shape, generator=generator)
    return given

"""Pipelines of transformers take exported models, and give what they give with PyTorch's."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    PreTrainedTokenizerFast,
    Wav2Vec2FeatureExtractor,
    WhisperFeatureExtractor,
    pipeline,
)
from transformers.pipelines import base

from tests.deploy.exported import WORDS, ort_model, torch_model

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = ["word7 word12 word30", "word9", "word20 word21 word22 word23 word8"]
SOUND = np.sin(np.arange(900) * 0.05).astype(np.float32)


@functools.cache
def tokenizer(*, closed: bool = True) -> Any:
    """Words by number; a sentence is closed in marks, where it is not to be written on."""
    words = {name: place for place, name in enumerate(SPECIAL)}
    words |= {f"word{place}": place for place in range(len(SPECIAL), WORDS)}
    made = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    if closed:
        made.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        padding_side="right" if closed else "left",
        **dict(zip(names, SPECIAL, strict=True)),
    )


@pytest.fixture(autouse=True)
def no_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline that does not know the class of a model logs an error."""

    def complain(*words: Any) -> None:
        raise AssertionError(words)

    monkeypatch.setattr(base.logger, "error", complain)


def both(task: str, name: str, inputs: Any, /, *, of: Any = None, **arguments: Any) -> None:
    """Runs a pipeline with PyTorch's model and with the exported one, and compares the answers."""
    results = []
    for model in (torch_model(name), ort_model(name)):
        run = pipeline(task, model=model, **arguments)
        torch.manual_seed(3)
        results.append(run(inputs, **(of or {})))
        assert run.model is model
    assert_close(results[1], results[0])


def assert_close(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_close(found[key], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for mine, its in zip(found, expected, strict=True):
            assert_close(mine, its)
    elif isinstance(expected, float | np.floating):
        assert found == pytest.approx(expected, abs=1e-4)
    else:
        assert found == expected


def test_text_classification() -> None:
    arguments = {"tokenizer": tokenizer()}
    both("text-classification", "classes", TEXTS, **arguments)
    both("text-classification", "classes", TEXTS, of={"batch_size": 2, "top_k": 3}, **arguments)


def test_zero_shot_classification() -> None:
    labels = {"candidate_labels": ["word6", "word40"], "hypothesis_template": "word9 {}"}
    both("zero-shot-classification", "classes", TEXTS[0], of=labels, tokenizer=tokenizer())


def test_token_classification() -> None:
    both("token-classification", "tokens", TEXTS, tokenizer=tokenizer())
    simple = {"aggregation_strategy": "simple", "batch_size": 3}
    both("token-classification", "tokens", TEXTS, of=simple, tokenizer=tokenizer())


def test_fill_mask() -> None:
    both("fill-mask", "masked", "word7 [MASK] word30", tokenizer=tokenizer())


def test_feature_extraction() -> None:
    both("feature-extraction", "features", TEXTS, tokenizer=tokenizer())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_text_generation(name: str) -> None:
    arguments = {"tokenizer": tokenizer(closed=False)}
    sampled = {"max_new_tokens": 6, "do_sample": True, "batch_size": 3}
    both("text-generation", name, TEXTS, of=sampled, **arguments)
    beams = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "return_full_text": False}
    both("text-generation", name, TEXTS[0], of=beams, **arguments)


def test_audio_classification() -> None:
    extractor = Wav2Vec2FeatureExtractor(return_attention_mask=True)
    of = {"top_k": 3}
    both("audio-classification", "sounds", SOUND, of=of, feature_extractor=extractor)


def test_speech_recognition_of_letters() -> None:
    parts = {
        "feature_extractor": Wav2Vec2FeatureExtractor(return_attention_mask=True),
        "tokenizer": tokenizer(closed=False),
    }
    both("automatic-speech-recognition", "letters", SOUND, **parts)


def test_speech_recognition_by_an_encoder_and_a_decoder() -> None:
    # 40 frames of 400 samples.
    extractor = WhisperFeatureExtractor(
        feature_size=8, sampling_rate=16000, hop_length=400, chunk_length=1, n_fft=800
    )

    class Reader(PreTrainedTokenizerFast):
        """Reads the numbers of tokens: the words of Whisper's own are not among these sixty."""

        def _decode_asr(self, outputs: Any, **_: Any) -> tuple[str, dict[str, Any]]:
            return str([each["tokens"].tolist() for each in outputs]), {}

    reader = Reader(tokenizer_object=tokenizer().backend_tokenizer)
    parts = {"feature_extractor": extractor, "tokenizer": reader}
    of = {"generate_kwargs": {"max_new_tokens": 8, "num_beams": 2}}
    both("automatic-speech-recognition", "whisper", SOUND, of=of, **parts)


@pytest.mark.skipif(importlib.util.find_spec("PIL") is None, reason="needs Pillow for its images")
def test_image_classification() -> None:
    from PIL import Image
    from transformers import ViTImageProcessor

    processor = ViTImageProcessor(size={"height": 12, "width": 12})
    image = Image.fromarray(np.arange(12 * 12 * 3, dtype=np.uint8).reshape(12, 12, 3))
    both("image-classification", "images", image, image_processor=processor)

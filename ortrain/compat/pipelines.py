"""Optimum's ``pipeline``: transformers' own, with an exported model in it."""

from __future__ import annotations

from ortrain.extras import require

require("torch", __name__)

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ortrain.compat import exported
from ortrain.compat.parts import preprocessors
from ortrain.compat.removed_tasks import KEYS, Answers, TextFromText
from ortrain.deploy.models import ORTModel
from ortrain.errors import InputError, listing

# Task → classes that it may be done with; of two, the first whose files are there.
_CLASSES = {
    "audio-classification": ("ORTModelForAudioClassification",),
    "automatic-speech-recognition": ("ORTModelForSpeechSeq2Seq", "ORTModelForCTC"),
    "feature-extraction": ("ORTModelForFeatureExtraction",),
    "fill-mask": ("ORTModelForMaskedLM",),
    "image-classification": ("ORTModelForImageClassification",),
    "question-answering": ("ORTModelForQuestionAnswering",),
    "summarization": ("ORTModelForSeq2SeqLM",),
    "text2text-generation": ("ORTModelForSeq2SeqLM",),
    "translation": ("ORTModelForSeq2SeqLM",),
    "text-classification": ("ORTModelForSequenceClassification",),
    "text-generation": ("ORTModelForCausalLM",),
    "token-classification": ("ORTModelForTokenClassification",),
    "zero-shot-classification": ("ORTModelForSequenceClassification",),
}
_OTHERWISE = {"sentiment-analysis": "text-classification", "ner": "token-classification"}


def pipeline(
    task: str,
    model: Any = None,
    tokenizer: Any = None,
    feature_extractor: Any = None,
    use_fast: bool = True,
    token: str | bool | None = None,
    accelerator: str | None = "ort",
    revision: str | None = None,
    trust_remote_code: bool | None = None,
    **kwargs: Any,
) -> Any:
    """A pipeline of transformers around an exported model; of ours where it has none any more.

    Args:
        task: by transformers' name.
        model: an `ORTModel`; a folder of one or of a checkpoint, which is exported; or a name on
            the hub. There is no default.
        tokenizer: by default that of the model's folder.
        feature_extractor: likewise; ``image_processor`` too.
        use_fast: as transformers has it.
        token: of the hub.
        accelerator: ``"ort"``.
        revision: of a model on the hub.
        trust_remote_code: whether code beside a checkpoint may be run.
        kwargs: of transformers' ``pipeline``.

    Raises:
        ValueError: another accelerator, or no model.
        InputError: there is no exported model for the task.
    """
    import transformers

    if accelerator not in ("ort", None):
        raise ValueError(f"accelerator={accelerator!r}: expected 'ort'")
    if model is None:
        raise ValueError(f"model is missing: there is no default for {task!r}; give a folder")
    if not isinstance(model, ORTModel):
        hub = {"token": token, "revision": revision, "trust_remote_code": bool(trust_remote_code)}
        model = _loaded(task, model, {name: value for name, value in hub.items() if value})
    parts = {"tokenizer": tokenizer, "feature_extractor": feature_extractor}
    parts["image_processor"] = kwargs.pop("image_processor", None)
    given = preprocessors(model.folder)
    given.update((name, part) for name, part in parts.items() if part is not None)
    if _task(task) in ("question-answering", *KEYS):
        if "tokenizer" not in given:
            raise InputError(f"there is no tokenizer in {model.folder}", help="give tokenizer=…")
        made = (given["tokenizer"],)
        return (
            Answers(model, *made)
            if _task(task) == "question-answering"
            else TextFromText(task, model, *made)
        )
    run: Callable[..., Any] = transformers.pipeline
    return run(task, model=model, use_fast=use_fast, **given, **kwargs)


def _task(name: str) -> str:
    """A task by its one name: ``translation_en_to_fr`` is a translation."""
    return "translation" if name.startswith("translation_") else _OTHERWISE.get(name, name)


def _loaded(task: str, model: Any, hub: dict[str, Any]) -> Any:
    """The exported model of a folder, or of a checkpoint in it."""
    names = _CLASSES.get(_task(task))
    if names is None:
        raise InputError(
            f"there is no exported model for {task!r}",
            because=f"there are some for {listing([*_CLASSES], 12)}",
            help="give model= an ORTModelFor… that transformers' pipeline of the task can call",
        )
    place = Path(model)
    there = place.is_dir() and any(place.glob("**/*.onnx"))
    error: Exception | None = None
    for name in names:
        kind = getattr(exported, name)
        try:
            if there or not place.is_dir():
                return kind.from_pretrained(model, **hub)
            return kind.from_pretrained(model, export=True, **hub)
        except (ValueError, InputError) as raised:
            error = error or raised
    assert error is not None
    raise error

"""Exported models of transformers in onnxruntime: called, searched and piped as the originals."""

from __future__ import annotations

from ortrain.extras import require

require("hf", __name__)

from typing import TYPE_CHECKING

from ortrain.deploy.model_names import MODELS
from ortrain.lazy import attributes

if TYPE_CHECKING:
    from ortrain.deploy.models.causal import ORTModelForCausalLM
    from ortrain.deploy.models.exporting import export_folder
    from ortrain.deploy.models.model import ORTModel
    from ortrain.deploy.models.seq2seq import ORTModelForSeq2SeqLM, ORTModelForSpeechSeq2Seq
    from ortrain.deploy.models.tasks import (
        ORTModelForAudioClassification,
        ORTModelForCTC,
        ORTModelForFeatureExtraction,
        ORTModelForImageClassification,
        ORTModelForMaskedLM,
        ORTModelForMultipleChoice,
        ORTModelForQuestionAnswering,
        ORTModelForSequenceClassification,
        ORTModelForTokenClassification,
    )

_HOME = {
    "ORTModel": "ortrain.deploy.models.model",
    "export_folder": "ortrain.deploy.models.exporting",
    **MODELS,
}

__all__ = [
    "ORTModel",
    "ORTModelForAudioClassification",
    "ORTModelForCTC",
    "ORTModelForCausalLM",
    "ORTModelForFeatureExtraction",
    "ORTModelForImageClassification",
    "ORTModelForMaskedLM",
    "ORTModelForMultipleChoice",
    "ORTModelForQuestionAnswering",
    "ORTModelForSeq2SeqLM",
    "ORTModelForSequenceClassification",
    "ORTModelForSpeechSeq2Seq",
    "ORTModelForTokenClassification",
    "export_folder",
]


__getattr__ = attributes(__name__, _HOME)


def __dir__() -> list[str]:
    return __all__

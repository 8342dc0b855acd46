"""The families of transformers: of each a small model of the first task that it has."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from tests.families.sizes import small


@dataclass(frozen=True)
class Task:
    """What models are for.

    Attributes:
        name: a word.
        table: of transformers, the models that there are for it by ``model_type``.
        loads: the class of ``ortrain.deploy`` that runs its files.
        output: of a call, what is compared.
    """

    name: str
    table: str
    loads: str
    output: str = "logits"


# In this order: of several tasks that a family has, it is tried with the first.
TASKS = (
    Task("images", "MODEL_FOR_IMAGE_CLASSIFICATION", "ORTModelForImageClassification"),
    Task("letters of speech", "MODEL_FOR_CTC", "ORTModelForCTC"),
    Task("sounds", "MODEL_FOR_AUDIO_CLASSIFICATION", "ORTModelForAudioClassification"),
    Task("text from speech", "MODEL_FOR_SPEECH_SEQ_2_SEQ", "ORTModelForSpeechSeq2Seq"),
    Task("text from text", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "ORTModelForSeq2SeqLM"),
    Task("masked words", "MODEL_FOR_MASKED_LM", "ORTModelForMaskedLM"),
    Task("text", "MODEL_FOR_CAUSAL_LM", "ORTModelForCausalLM"),
    Task("classes", "MODEL_FOR_SEQUENCE_CLASSIFICATION", "ORTModelForSequenceClassification"),
    Task("features", "MODEL", "ORTModelForFeatureExtraction", "last_hidden_state"),
)
# Whisper's classifier of sounds comes before its writer in the order above.
_OTHERWISE = {"whisper": "text from speech"}


@dataclass(frozen=True)
class Family:
    """A family with the task it is tried with.

    Attributes:
        name: its ``model_type``.
        task: the first that it has.
        kind: name of its class in transformers.
    """

    name: str
    task: Task
    kind: str


@functools.cache
def families() -> dict[str, Family]:
    """All families by name."""
    found: dict[str, Family] = {}
    for task in TASKS:
        table = getattr(modeling_auto, f"{task.table}_MAPPING_NAMES")
        for name, kind in table.items():
            kind = kind if isinstance(kind, str) else kind[0]
            if name.startswith("ortrain-") or _OTHERWISE.get(name, task.name) != task.name:
                continue
            if hasattr(transformers, kind):
                found.setdefault(name, Family(name, task, kind))
    return dict(sorted(found.items()))


def drawn(family: Family, attention: str = "sdpa") -> Any:
    """A small model with weights large enough that a wrong graph answers otherwise."""
    kind = getattr(transformers, family.kind)
    config = small(family.name)
    config._attn_implementation = attention if _takes(kind, attention) else "eager"
    torch.manual_seed(0)
    model = kind(config).float().eval()
    for part in model.modules():
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
            part.running_var.uniform_(0.5, 1.5)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            size = parameter.shape
            if parameter.ndim > 1:
                width = max(size[-1], 1) if parameter.ndim == 2 else parameter[0].numel()
                parameter.copy_(torch.randn(size, generator=generator) * max(width, 1) ** -0.5)
            elif parameter.ndim == 1:
                parameter.add_(torch.randn(size, generator=generator), alpha=0.1)
    return model


def _takes(kind: Any, attention: str) -> bool:
    return attention == "eager" or bool(getattr(kind, f"_supports_{attention}", True))

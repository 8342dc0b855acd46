"""Training arguments for Optimum's trainers, with the fields that transformers no longer has."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ortrain.compat.old_fields import OldFields, with_old_fields
from ortrain.trainer import ORTSeq2SeqTrainingArguments as _Seq2SeqTrainingArguments
from ortrain.trainer import ORTTrainingArguments as _TrainingArguments

__all__ = ["ORTOptimizerNames", "ORTSeq2SeqTrainingArguments", "ORTTrainingArguments"]


if TYPE_CHECKING:

    class _WithOldFields(OldFields, _TrainingArguments):
        pass

    class _Seq2SeqWithOldFields(OldFields, _Seq2SeqTrainingArguments):
        pass
else:
    _WithOldFields = with_old_fields(_TrainingArguments)
    _Seq2SeqWithOldFields = with_old_fields(_Seq2SeqTrainingArguments)


class ORTOptimizerNames(enum.StrEnum):
    """Names of optimizers that transformers does not have."""

    ADAMW_ORT_FUSED = "adamw_ort_fused"


@dataclass
class ORTTrainingArguments(_WithOldFields):
    """The arguments of ORTTrainer, also by names that transformers no longer has.

    ``inference_with_ort`` is an attribute and no argument here: old scripts have one of their own
    on their command line, and give it to ``evaluate`` and ``predict``.

    Raises:
        ValueError: as ortrain's own, and of a field that stands against another.
    """

    output_dir: str | None = None
    inference_with_ort: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.translate()
        super().__post_init__()


@dataclass
class ORTSeq2SeqTrainingArguments(_Seq2SeqWithOldFields):
    """The arguments of ORTSeq2SeqTrainer, also by names that transformers no longer has."""

    output_dir: str | None = None
    inference_with_ort: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.translate()
        super().__post_init__()

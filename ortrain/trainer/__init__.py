"""ORTTrainer: Hugging Face's Trainer with ORTModule inside."""

from ortrain.extras import require

require("hf", __name__)

from ortrain.trainer.arguments import ORTSeq2SeqTrainingArguments, ORTTrainingArguments
from ortrain.trainer.report import TrainerReport
from ortrain.trainer.trainer import ORTSeq2SeqTrainer, ORTTrainer, ORTTrainerMixin

__all__ = [
    "ORTSeq2SeqTrainer",
    "ORTSeq2SeqTrainingArguments",
    "ORTTrainer",
    "ORTTrainerMixin",
    "ORTTrainingArguments",
    "TrainerReport",
]

"""Masked language modelling: words that were taken out of a text, with a small ModernBERT.

    python examples/masked_language_modeling.py [--engine both] [--train_file rows.json] …

In the synthetic language each word is followed by one of four, so that its neighbours tell a word.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common import ExampleArguments, compare, load, model_of, parse, sentences, tokenizer_of
from torch import Tensor
from transformers import (
    AutoModelForMaskedLM,
    BatchEncoding,
    DataCollatorForLanguageModeling,
    EvalPrediction,
    ModernBertConfig,
    PreTrainedModel,
)

from ortrain import ORTTrainer, ORTTrainingArguments


@dataclass
class Arguments(ExampleArguments):
    """What this example takes besides the training arguments."""

    max_seq_length: int = field(default=96, metadata={"help": "Longer texts are cut, in tokens."})
    mlm_probability: float = field(default=0.3, metadata={"help": "Share of words taken out."})


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The share of the missing words that are found."""
    found, labels = prediction
    missing = labels >= 0
    return {"accuracy": float((found[missing] == labels[missing]).mean())}


def best(logits: Tensor, labels: Tensor) -> Tensor:
    """The most likely words: all that the metric needs of what fills the memory."""
    return logits.argmax(-1)


def main() -> None:
    arguments, training = parse(
        Arguments,
        ORTTrainingArguments,
        max_steps=300,
        per_device_train_batch_size=16,
        learning_rate=2e-3,
    )
    data = load(arguments, sentences)
    tokenizer = tokenizer_of(arguments, data[0]["text"])

    def encode(batch: dict[str, list[str]]) -> BatchEncoding:
        return tokenizer(
            batch["text"],
            truncation=True,
            max_length=arguments.max_seq_length,
            return_special_tokens_mask=True,
        )

    train, evaluation = (
        part.map(encode, batched=True, remove_columns=part.column_names) for part in data
    )
    config = ModernBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=arguments.max_seq_length,
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        cls_token_id=tokenizer.cls_token_id,
        sep_token_id=tokenizer.sep_token_id,
    )

    def model() -> PreTrainedModel:
        return model_of(AutoModelForMaskedLM, config, arguments)

    def trainer(args: ORTTrainingArguments) -> ORTTrainer:
        # With a seed of its own it masks the same words for each engine.
        masking = DataCollatorForLanguageModeling(
            tokenizer, mlm_probability=arguments.mlm_probability, seed=args.seed
        )
        return ORTTrainer(
            model_init=model,
            args=args,
            train_dataset=train,
            eval_dataset=evaluation,
            data_collator=masking,
            processing_class=tokenizer,
            compute_metrics=accuracy,
            preprocess_logits_for_metrics=best,
        )

    compare(trainer, arguments, training, metric="eval_accuracy")


if __name__ == "__main__":
    main()

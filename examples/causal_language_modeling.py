"""Causal language modelling: the next word of a text, with a small Llama.

    python examples/causal_language_modeling.py [--engine both] [--train_file rows.json] …

In the synthetic language each word is followed by one of four, half of the time by the same one:
nobody can know more than 50 % of the next words.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from common import ExampleArguments, compare, load, model_of, parse, sentences, tokenizer_of
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    EvalPrediction,
    LlamaConfig,
    PreTrainedModel,
    default_data_collator,
)

from ortrain import ORTTrainer, ORTTrainingArguments


@dataclass
class Arguments(ExampleArguments):
    """What this example takes besides the training arguments."""

    block_size: int = field(default=96, metadata={"help": "Tokens of a row to train on."})


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The share of words that the words before them tell."""
    found, labels = prediction
    return {"accuracy": float((found[:, :-1] == labels[:, 1:]).mean())}


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

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        # One text after the other, cut into blocks; what remains is left out.
        ids = [*itertools.chain(*tokenizer(batch["text"])["input_ids"])]
        ends = range(arguments.block_size, len(ids) + 1, arguments.block_size)
        blocks = [ids[end - arguments.block_size : end] for end in ends]
        return {"input_ids": blocks, "labels": blocks}

    train, evaluation = (
        part.map(encode, batched=True, remove_columns=part.column_names) for part in data
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=384,
        max_position_embeddings=arguments.block_size,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )

    def model() -> PreTrainedModel:
        return model_of(AutoModelForCausalLM, config, arguments)

    def trainer(args: ORTTrainingArguments) -> ORTTrainer:
        return ORTTrainer(
            model_init=model,
            args=args,
            train_dataset=train,
            eval_dataset=evaluation,
            data_collator=default_data_collator,
            processing_class=tokenizer,
            compute_metrics=accuracy,
            preprocess_logits_for_metrics=best,
        )

    compare(trainer, arguments, training, metric="eval_accuracy")


if __name__ == "__main__":
    main()

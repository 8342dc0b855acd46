"""Translation with a small Marian, evaluated by the texts that it generates.

    python examples/translation.py [--engine both] [--train_file rows.json] …

The two synthetic languages have a word for each other's words; in the second one an adjective
follows its noun.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
from common import ExampleArguments, compare, load, model_of, parse, tokenizer_of, words
from datasets import Dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    BatchEncoding,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    MarianConfig,
    PreTrainedModel,
)

from ortrain import ORTSeq2SeqTrainer, ORTSeq2SeqTrainingArguments


@dataclass
class Arguments(ExampleArguments):
    """What this example takes besides the training arguments."""

    max_source_length: int = field(default=64, metadata={"help": "Longer texts are cut."})
    max_target_length: int = field(default=64, metadata={"help": "Longer texts are cut."})


def rows(count: int, seed: int) -> Dataset:
    """Texts and their translations."""
    dice = random.Random(seed)
    known = words(200)
    meaning = dict(zip(known[:100], known[100:], strict=True))
    nouns, adjectives, others = known[:40], known[40:70], known[70:100]
    found: dict[str, list[str]] = {"source": [], "target": []}
    for _ in range(count):
        source, target = [], []
        for _ in range(dice.randint(3, 8)):
            adjective, noun, other = map(dice.choice, (adjectives, nouns, others))
            source += [adjective, noun, other]
            target += [meaning[noun], meaning[adjective], meaning[other]]
        found["source"].append(" ".join(source))
        found["target"].append(" ".join(target))
    return Dataset.from_dict(found)


def main() -> None:
    arguments, training = parse(
        Arguments,
        ORTSeq2SeqTrainingArguments,
        max_steps=400,
        per_device_train_batch_size=32,
        learning_rate=1e-3,
        predict_with_generate=True,
    )
    if training.generation_max_length is None:
        training.generation_max_length = arguments.max_target_length
    data = load(arguments, rows)
    tokenizer = tokenizer_of(arguments, [*data[0]["source"], *data[0]["target"]])

    def encode(batch: dict[str, list[str]]) -> BatchEncoding:
        encoding = tokenizer(
            batch["source"], truncation=True, max_length=arguments.max_source_length
        )
        encoding["labels"] = tokenizer(
            text_target=batch["target"], truncation=True, max_length=arguments.max_target_length
        )["input_ids"]
        return encoding

    def decode(ids: np.ndarray) -> list[list[str]]:
        ids = np.where(ids < 0, tokenizer.pad_token_id, ids)
        return [text.split() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]

    def accuracy(prediction: EvalPrediction) -> dict[str, float]:
        """The share of words that stand where they should."""
        hits = total = 0
        for ours, theirs in zip(*map(decode, prediction), strict=True):
            hits += sum(a == b for a, b in zip(ours, theirs, strict=False))
            total += max(len(ours), len(theirs))
        return {"accuracy": hits / max(total, 1)}

    train, evaluation = (
        part.map(encode, batched=True, remove_columns=part.column_names) for part in data
    )
    config = MarianConfig(
        vocab_size=len(tokenizer),
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        max_position_embeddings=max(arguments.max_source_length, arguments.max_target_length),
        init_std=0.08,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.sep_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
        forced_eos_token_id=None,
        scale_embedding=True,
    )

    def model() -> PreTrainedModel:
        return model_of(AutoModelForSeq2SeqLM, config, arguments)

    def trainer(args: ORTSeq2SeqTrainingArguments) -> ORTSeq2SeqTrainer:
        return ORTSeq2SeqTrainer(
            model_init=model,
            args=args,
            train_dataset=train,
            eval_dataset=evaluation,
            data_collator=DataCollatorForSeq2Seq(tokenizer),
            processing_class=tokenizer,
            compute_metrics=accuracy,
        )

    compare(trainer, arguments, training, metric="eval_accuracy")


if __name__ == "__main__":
    main()

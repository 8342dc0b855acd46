"""Extractive question answering: where in a text the answer stands, with a small ELECTRA.

    python examples/question_answering.py [--engine both] [--train_file rows.json] …

A synthetic text tells several things (who, where, when, …) in any order, and the question asks for
one of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from common import ExampleArguments, compare, load, model_of, parse, tokenizer_of, words
from datasets import Dataset
from transformers import (
    AutoModelForQuestionAnswering,
    BatchEncoding,
    DataCollatorWithPadding,
    ElectraConfig,
    EvalPrediction,
    PreTrainedModel,
)

from ortrain import ORTTrainer, ORTTrainingArguments

KINDS = 3


@dataclass
class Arguments(ExampleArguments):
    """What this example takes besides the training arguments."""

    max_seq_length: int = field(default=96, metadata={"help": "Longer texts are cut, in tokens."})


def rows(count: int, seed: int) -> Dataset:
    """Questions, texts and answers, in the form of SQuAD."""
    dice = random.Random(seed)
    known = words(300)
    common, asking = known[:80], known[80:98]
    first, last = ([known[40 * kind + i :][:20] for kind in range(KINDS)] for i in (100, 120))
    found: dict[str, list[Any]] = {"question": [], "context": [], "answers": []}
    for _ in range(count):
        answers = [
            " ".join([dice.choice(a), *dice.choices(common, k=dice.randint(0, 2)), dice.choice(b)])
            for a, b in zip(first, last, strict=True)
        ]
        parts = []
        for answer in dice.sample(answers, KINDS):
            parts += [*dice.choices(common, k=dice.randint(8, 16)), answer]
        context, kind = " ".join(parts), dice.randrange(KINDS)
        start = len(" ".join(parts[: parts.index(answers[kind])])) + 1
        found["question"].append(" ".join(dice.choices(asking[kind::KINDS], k=6)))
        found["context"].append(context)
        found["answers"].append({"text": [answers[kind]], "answer_start": [start]})
    return Dataset.from_dict(found)


def exact_match(prediction: EvalPrediction) -> dict[str, float]:
    """The share of answers that are found whole, and the overlap of those that are not."""
    logits, (first, last) = prediction
    start, end = (scores.argmax(-1) for scores in logits)
    overlap = np.maximum(np.minimum(end, last) - np.maximum(start, first) + 1, 0)
    lengths = np.maximum(end - start + 1, 0) + last - first + 1
    exact = (start == first) & (end == last)
    return {"exact_match": float(exact.mean()), "f1": float((2 * overlap / lengths).mean())}


def main() -> None:
    arguments, training = parse(
        Arguments,
        ORTTrainingArguments,
        max_steps=300,
        per_device_train_batch_size=32,
        learning_rate=1e-3,
    )
    data = load(arguments, rows)
    texts = (text for name in ("question", "context") for text in data[0][name])
    tokenizer = tokenizer_of(arguments, texts)

    def encode(batch: dict[str, list[Any]]) -> BatchEncoding:
        encoding = tokenizer(
            batch["question"],
            batch["context"],
            truncation="only_second",
            max_length=arguments.max_seq_length,
        )
        encoding["start_positions"], encoding["end_positions"] = [], []
        for i, answer in enumerate(batch["answers"]):
            start = answer["answer_start"][0]
            ends = [start, start + len(answer["text"][0]) - 1]
            tokens = [encoding.char_to_token(i, character, 1) for character in ends]
            # An answer that was cut off is at the first token.
            first, last = (0, 0) if None in tokens else tokens
            encoding["start_positions"].append(first)
            encoding["end_positions"].append(last)
        return encoding

    train, evaluation = (part.map(encode, batched=True) for part in data)
    config = ElectraConfig(
        vocab_size=len(tokenizer),
        embedding_size=128,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=arguments.max_seq_length,
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
    )

    def model() -> PreTrainedModel:
        return model_of(AutoModelForQuestionAnswering, config, arguments)

    def trainer(args: ORTTrainingArguments) -> ORTTrainer:
        return ORTTrainer(
            model_init=model,
            args=args,
            train_dataset=train,
            eval_dataset=evaluation,
            data_collator=DataCollatorWithPadding(tokenizer),
            processing_class=tokenizer,
            compute_metrics=exact_match,
        )

    compare(trainer, arguments, training, metric="eval_exact_match")


if __name__ == "__main__":
    main()

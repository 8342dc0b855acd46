"""Token classification: names of persons, places and companies in a text, with a small RoFormer.

    python examples/token_classification.py [--engine both] [--train_file rows.json] …

In a synthetic text a title stands before each name, and tells the kind where the name does not.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from common import ExampleArguments, compare, load, model_of, parse, tokenizer_of, words
from datasets import Dataset
from transformers import (
    AutoModelForTokenClassification,
    BatchEncoding,
    DataCollatorForTokenClassification,
    EvalPrediction,
    PreTrainedModel,
    RoFormerConfig,
)

from ortrain import ORTTrainer, ORTTrainingArguments

LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG", "I-ORG"]


@dataclass
class Arguments(ExampleArguments):
    """What this example takes besides the training arguments."""

    max_seq_length: int = field(default=96, metadata={"help": "Longer texts are cut, in tokens."})


def rows(count: int, seed: int) -> Dataset:
    """Words, and for each the position of its tag in `LABELS`."""
    dice = random.Random(seed)
    known = words(300)
    common, titles, last = known[:150], known[150:165], known[165:180]
    first = [known[40 * kind + 180 :][:40] for kind in range(3)]
    texts, tags = [], []
    for _ in range(count):
        text: list[str] = []
        tag: list[int] = []
        while len(text) < 70:
            kind, length, gap = dice.randrange(3), dice.randint(0, 2), dice.randint(2, 8)
            # One name in five may be of any kind.
            pool = dice.choice(first) if dice.random() < 0.2 else first[kind]
            text += [*dice.choices(common, k=gap), titles[3 * dice.randrange(5) + kind]]
            text += [dice.choice(pool), *dice.choices(last, k=length)]
            tag += [0] * (gap + 1) + [2 * kind + 1] + [2 * kind + 2] * length
        texts.append(text)
        tags.append(tag)
    return Dataset.from_dict({"tokens": texts, "ner_tags": tags})


def entities(tags: Iterable[int]) -> set[tuple[int, int, int]]:
    """First position, end and kind of each name."""
    found, start, inside = set(), 0, 0
    for i, tag in enumerate([*tags, 0]):
        if inside and tag != inside:
            found.add((start, i, inside))
            inside = 0
        if LABELS[tag].startswith("B"):
            start, inside = i, tag + 1
    return found


def f1(prediction: EvalPrediction) -> dict[str, float]:
    """Of names that are found whole and of the right kind."""
    logits, labels = prediction
    hits = found = wanted = 0
    for tags, right in zip(logits.argmax(-1), labels, strict=True):
        known = right >= 0
        ours, theirs = entities(tags[known]), entities(right[known])
        hits, found, wanted = hits + len(ours & theirs), found + len(ours), wanted + len(theirs)
    return {"f1": 2 * hits / max(found + wanted, 1)}


def main() -> None:
    arguments, training = parse(
        Arguments,
        ORTTrainingArguments,
        max_steps=300,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
    )
    data = load(arguments, rows)
    tokenizer = tokenizer_of(arguments, (" ".join(text) for text in data[0]["tokens"]))

    def encode(batch: dict[str, list[list[int]]]) -> BatchEncoding:
        encoding = tokenizer(
            batch["tokens"],
            is_split_into_words=True,
            truncation=True,
            max_length=arguments.max_seq_length,
        )
        encoding["labels"] = []
        for i, tags in enumerate(batch["ner_tags"]):
            # The first token of each word has its tag, and no other has one.
            places = itertools.pairwise([None, *encoding.word_ids(i)])
            encoding["labels"].append(
                [-100 if word in (None, before) else tags[word] for before, word in places]
            )
        return encoding

    train, evaluation = (part.map(encode, batched=True) for part in data)
    config = RoFormerConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=arguments.max_seq_length,
        initializer_range=0.05,
        id2label=dict(enumerate(LABELS)),
        label2id={label: i for i, label in enumerate(LABELS)},
        pad_token_id=tokenizer.pad_token_id,
    )

    def model() -> PreTrainedModel:
        return model_of(AutoModelForTokenClassification, config, arguments)

    def trainer(args: ORTTrainingArguments) -> ORTTrainer:
        return ORTTrainer(
            model_init=model,
            args=args,
            train_dataset=train,
            eval_dataset=evaluation,
            data_collator=DataCollatorForTokenClassification(tokenizer),
            processing_class=tokenizer,
            compute_metrics=f1,
        )

    compare(trainer, arguments, training, metric="eval_f1")


if __name__ == "__main__":
    main()

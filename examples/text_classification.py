"""Text classification: which of four topics a text is about, with a small BERT.

    python examples/text_classification.py [--engine both] [--train_file rows.json] …

A synthetic text mixes words of its own topic with common words and words of other topics.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from common import ExampleArguments, compare, load, model_of, parse, tokenizer_of, words
from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedModel,
)

from ortrain import ORTTrainer, ORTTrainingArguments

TOPICS = 4


@dataclass
class Arguments(ExampleArguments):
    """What this example takes besides the training arguments."""

    max_seq_length: int = field(default=96, metadata={"help": "Longer texts are cut, in tokens."})


def rows(count: int, seed: int) -> Dataset:
    """Texts and their labels."""
    dice = random.Random(seed)
    known = words(400)
    common, topics = known[:200], [known[50 * topic + 200 :][:50] for topic in range(TOPICS)]
    labels = [dice.randrange(TOPICS) for _ in range(count)]
    texts = []
    for label in labels:
        weights = [0.55, 0.15, *[0.3 / TOPICS] * TOPICS]
        sources = dice.choices([common, topics[label], *topics], weights, k=dice.randint(48, 94))
        texts.append(" ".join(dice.choice(source) for source in sources))
    return Dataset.from_dict({"text": texts, "label": labels})


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The share of texts whose topic is found."""
    logits, labels = prediction
    return {"accuracy": float((logits.argmax(-1) == labels).mean())}


def main() -> None:
    arguments, training = parse(
        Arguments,
        ORTTrainingArguments,
        max_steps=300,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
    )
    data = load(arguments, rows)
    tokenizer = tokenizer_of(arguments, data[0]["text"])
    train, evaluation = (
        part.map(
            lambda batch: tokenizer(
                batch["text"], truncation=True, max_length=arguments.max_seq_length
            ),
            batched=True,
        )
        for part in data
    )
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=arguments.max_seq_length,
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
    )

    config.num_labels = max(data[0]["label"]) + 1

    def model() -> PreTrainedModel:
        return model_of(AutoModelForSequenceClassification, config, arguments)

    def trainer(args: ORTTrainingArguments) -> ORTTrainer:
        return ORTTrainer(
            model_init=model,
            args=args,
            train_dataset=train,
            eval_dataset=evaluation,
            data_collator=DataCollatorWithPadding(tokenizer),
            processing_class=tokenizer,
            compute_metrics=accuracy,
        )

    compare(trainer, arguments, training, metric="eval_accuracy")


if __name__ == "__main__":
    main()

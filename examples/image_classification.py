"""Image classification: which shape a picture shows, with a small ViT.

    python examples/image_classification.py [--engine both] [--train_file rows.parquet] …

A synthetic picture shows a square, a disc, a cross or a ring, of any size and colour, anywhere on a
noisy ground.
"""

from __future__ import annotations

import numpy as np
from common import ExampleArguments, compare, load, model_of, parse
from datasets import Array3D, Dataset, Features, Value
from transformers import (
    AutoModelForImageClassification,
    EvalPrediction,
    PreTrainedModel,
    ViTConfig,
    default_data_collator,
)

from ortrain import ORTTrainer, ORTTrainingArguments

SIZE, SHAPES = 32, 4


def rows(count: int, seed: int) -> Dataset:
    """Pictures of three channels around 0, and their labels."""
    dice = np.random.default_rng(seed)
    labels = dice.integers(SHAPES, size=count)
    radius = dice.uniform(6, 10, (count, 1, 1))
    x, y = (np.arange(SIZE) - dice.uniform(11, SIZE - 11, (count, 1)) for _ in range(2))
    x, y = np.abs(x[:, None, :]) / radius, np.abs(y[:, :, None]) / radius
    distance = np.hypot(x, y)
    shapes = [
        np.maximum(x, y) < 0.9,
        distance < 1,
        (np.maximum(x, y) < 1) & (np.minimum(x, y) < 0.3),
        (distance < 1) & (distance > 0.6),
    ]
    shown = np.choose(labels[:, None, None], shapes)[:, None]
    ground, colour = dice.uniform(0, 1, (2, count, 3, 1, 1))
    pictures = np.where(shown, colour, -ground) + 0.1 * dice.normal(size=(count, 3, SIZE, SIZE))
    form = Features({"pixel_values": Array3D((3, SIZE, SIZE), "float32"), "label": Value("int64")})
    return Dataset.from_dict({"pixel_values": pictures.astype(np.float32), "label": labels}, form)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The share of pictures whose shape is found."""
    logits, labels = prediction
    return {"accuracy": float((logits.argmax(-1) == labels).mean())}


def main() -> None:
    arguments, training = parse(
        ExampleArguments,
        ORTTrainingArguments,
        max_steps=300,
        per_device_train_batch_size=32,
        learning_rate=1e-3,
    )
    train, evaluation = (part.with_format("torch") for part in load(arguments, rows))
    config = ViTConfig(
        image_size=train[0]["pixel_values"].shape[-1],
        patch_size=4,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=512,
        initializer_range=0.08,
    )

    config.num_labels = int(max(train["label"])) + 1

    def model() -> PreTrainedModel:
        return model_of(AutoModelForImageClassification, config, arguments)

    def trainer(args: ORTTrainingArguments) -> ORTTrainer:
        return ORTTrainer(
            model_init=model,
            args=args,
            train_dataset=train,
            eval_dataset=evaluation,
            data_collator=default_data_collator,
            compute_metrics=accuracy,
        )

    compare(trainer, arguments, training, metric="eval_accuracy")


if __name__ == "__main__":
    main()

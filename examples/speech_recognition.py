"""Speech recognition: the keys that were dialled on a telephone, by CTC with a small Wav2Vec2.

    python examples/speech_recognition.py [--engine both] [--train_file rows.parquet] …

Each key sounds two tones at once, as telephones have them. The graph computes the logits; CTC, for
which ONNX has no operator, is computed from them by PyTorch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from common import ExampleArguments, compare, load, model_of, parse
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCTC, EvalPrediction, PreTrainedModel, Wav2Vec2Config

from ortrain import ORTTrainer, ORTTrainingArguments

RATE = 4000
KEYS = "123456789*0#"
LOW, HIGH = (697, 770, 852, 941), (1209, 1336, 1477)
BLANK = 0  # the key at position i of KEYS has the number i + 1


def rows(count: int, seed: int) -> Dataset:
    """Samples of sound, and the keys."""
    dice = np.random.default_rng(seed)
    sounds, texts = [], []
    for _ in range(count):
        keys = dice.integers(len(KEYS), size=dice.integers(3, 7))
        parts = [np.zeros(dice.integers(100, 400))]
        for key in keys:
            times = np.arange(dice.integers(240, 400)) / RATE
            tones = np.array([[LOW[key // 3]], [HIGH[key % 3]]]) * times + dice.random((2, 1))
            sound = dice.uniform(0.5, 1) * np.sin(2 * np.pi * tones).sum(0)
            parts += [sound, np.zeros(dice.integers(80, 200))]
        sound = np.concatenate(parts)
        sounds.append((sound + 0.2 * dice.normal(size=len(sound))).astype(np.float32))
        texts.append("".join(KEYS[key] for key in keys))
    return Dataset.from_dict({"input_values": sounds, "text": texts})


def collate(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Sounds that end in silence, and the numbers of the keys, that end in -100."""
    sounds = [torch.as_tensor(row["input_values"]) for row in batch]
    labels = [torch.tensor([KEYS.index(key) + 1 for key in row["text"]]) for row in batch]
    return {
        "input_values": pad_sequence(sounds, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def ctc_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    """Mean loss of a key."""
    scores = outputs.logits.log_softmax(-1).transpose(0, 1)
    known = labels >= 0
    loss = torch.nn.functional.ctc_loss(
        scores,
        labels[known],
        torch.full((scores.shape[1],), scores.shape[0]),
        known.sum(-1),
        blank=BLANK,
        reduction="sum",
        zero_infinity=True,
    )
    return loss / (known.sum() if num_items_in_batch is None else num_items_in_batch)


def best(logits: Tensor, labels: Tensor) -> Tensor:
    """The most likely key of each moment, or the blank."""
    return logits.argmax(-1)


def error_rate(prediction: EvalPrediction) -> dict[str, float]:
    """Keys to be inserted, removed or replaced, of all keys."""
    heard, labels = prediction
    errors = total = 0
    for moments, label in zip(heard, labels, strict=True):
        changes = np.concatenate([[True], moments[1:] != moments[:-1]])
        found = moments[changes & (moments > BLANK)]
        wanted = label[label >= 0]
        errors, total = errors + distance(found, wanted), total + len(wanted)
    return {"error_rate": errors / total}


def distance(a: Any, b: Any) -> int:
    """The least number of changes that make one sequence another (Levenshtein)."""
    row = [*range(len(b) + 1)]
    for i, x in enumerate(a):
        before, row = row, [i + 1]
        for j, y in enumerate(b):
            row.append(min(before[j] + (x != y), before[j + 1] + 1, row[j] + 1))
    return row[-1]


def main() -> None:
    arguments, training = parse(
        ExampleArguments,
        ORTTrainingArguments,
        max_steps=300,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        remove_unused_columns=False,
    )
    train, evaluation = load(arguments, rows)
    config = Wav2Vec2Config(
        vocab_size=len(KEYS) + 1,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        conv_dim=(64, 128, 128, 128),
        conv_kernel=(10, 3, 3, 3),
        conv_stride=(5, 2, 2, 2),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        # What numpy would draw at each step, and layers that are left out at random, are no graph.
        apply_spec_augment=False,
        layerdrop=0.0,
        initializer_range=0.08,
        pad_token_id=BLANK,
    )

    def model() -> PreTrainedModel:
        return model_of(AutoModelForCTC, config, arguments)

    def trainer(args: ORTTrainingArguments) -> ORTTrainer:
        return ORTTrainer(
            model_init=model,
            args=args,
            train_dataset=train,
            eval_dataset=evaluation,
            data_collator=collate,
            compute_loss_func=ctc_loss,
            compute_metrics=error_rate,
            preprocess_logits_for_metrics=best,
        )

    compare(trainer, arguments, training, metric="eval_error_rate")


if __name__ == "__main__":
    main()

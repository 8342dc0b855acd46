"""trl's trainers."""

from __future__ import annotations

import tempfile
from typing import Any

import trl
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from tests.libraries.made import llama, texts, tokenizer
from tests.libraries.ways import Way


def _train(way: Way, kind: Any, config: Any, model: Any, given: Any, **more: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        args = config(
            **way.arguments(folder),
            gradient_checkpointing=False,
            **{"bf16": False, "per_device_train_batch_size": 8, **more},
        )
        trainer = way.trainer(kind, model=model, args=args, processing_class=tokenizer(), **given)
        way.trained(trainer)


def _decoder(way: Way) -> Any:
    return llama(way.large, LlamaForCausalLM)


def sft(way: Way, **more: Any) -> None:
    """Texts of varied lengths, padded to the longest of a batch; the loss in chunks, by default."""
    data = {"train_dataset": texts("text", longest=100 if way.large else 40)}
    _train(way, trl.SFTTrainer, trl.SFTConfig, _decoder(way), data, **more)


def sft_bf16(way: Way) -> None:
    """In bfloat16, trl's default."""
    sft(way, bf16=True, per_device_train_batch_size=16 if way.large else 8)


def sft_dft(way: Way) -> None:
    """By the model's whole logits: the loss of dynamic fine-tuning."""
    sft(way, loss_type="dft")


def dpo(way: Way) -> None:
    """Pairs of answers, and a reference model."""
    data = texts("prompt", "chosen", "rejected", longest=20)
    given = {"train_dataset": data, "ref_model": _decoder(way)}
    _train(way, trl.DPOTrainer, trl.DPOConfig, _decoder(way), given)


def kto(way: Way) -> None:
    """Answers that are good or bad."""
    data = texts("prompt", "completion", "label", longest=20)
    given = {"train_dataset": data, "ref_model": _decoder(way)}
    _train(way, trl.KTOTrainer, trl.KTOConfig, _decoder(way), given)


def distinct(completions: list[str], **_: Any) -> list[float]:
    """A reward for different words."""
    return [float(len(set(completion.split()))) for completion in completions]


def grpo(way: Way) -> None:
    """Answers of the model's own, and a reward."""
    given = {"train_dataset": texts("prompt", longest=10), "reward_funcs": distinct}
    sizes = {"num_generations": 4, "max_completion_length": 8}
    _train(way, trl.GRPOTrainer, trl.GRPOConfig, _decoder(way), given, **sizes)


def reward(way: Way) -> None:
    """A classifier of which answer is better."""
    model = llama(way.large, LlamaForSequenceClassification, num_labels=1)
    given = {"train_dataset": texts("chosen", "rejected")}
    _train(way, trl.RewardTrainer, trl.RewardConfig, model, given)

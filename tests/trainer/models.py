"""Small models, data and runs: the same training by Trainer and by ORTTrainer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from ortrain import ORTTrainer, ORTTrainingArguments

WORDS, LABELS = 60, 3
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def bert(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    lengths = {"intermediate_size": 32, "max_position_embeddings": 32}
    return BertForSequenceClassification(BertConfig(**SIZES, **lengths, **rates, num_labels=LABELS))


def gpt2(words: int = WORDS) -> Any:
    torch.manual_seed(0)
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    sizes = {**SIZES, "vocab_size": words, "max_position_embeddings": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, **tokens))


def t5() -> Any:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_decoder_layers": 1, "d_kv": 8, "d_ff": 32}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


def texts(count: int = 48, kind: str = "classes") -> list[dict[str, Any]]:
    """Token ids of different lengths, with a class that the first one tells, or their own copy."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(count):
        length = int(torch.randint(4, 10, (1,), generator=generator))
        ids = torch.randint(3, WORDS, (length,), generator=generator)
        labels = int(ids[0]) % LABELS if kind == "classes" else ids.clone()
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return rows


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pads to the longest."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, fill: int) -> Tensor:
        return torch.stack(
            [
                torch.nn.functional.pad(row[name], (0, longest - len(row[name])), value=fill)
                for row in rows
            ]
        )

    batch = {"input_ids": padded("input_ids", 0), "attention_mask": padded("attention_mask", 0)}
    if "labels" in rows[0]:
        whole = isinstance(rows[0]["labels"], Tensor)
        labels = [row["labels"] for row in rows]
        batch["labels"] = padded("labels", -100) if whole else torch.tensor(labels)
    return batch


@dataclass
class Run:
    """A finished training."""

    trainer: Any
    losses: list[float]
    norms: list[float]
    metrics: dict[str, float]
    weights: dict[str, Tensor]


def arguments(folder: Path, kind: type = ORTTrainingArguments, **more: Any) -> Any:
    """Six steps of batch 8, each logged; the graph forced where there is one."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 8,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "learning_rate": 1e-3,
        "disable_tqdm": True,
        "seed": 3,
        "dataloader_pin_memory": False,
        "use_cpu": True,
        "log_level": "error",
    }
    if issubclass(kind, ORTTrainingArguments):
        settings |= {"ort_engine": "onnxruntime", "ort_fallback": "raise"}
    return kind(**{**settings, **more})


def train(
    kind: type,
    args: Any,
    model: Any,
    rows: list[dict[str, Any]],
    *,
    resume: str | None = None,
    **more: Any,
) -> Run:
    """Trains and evaluates.

    Args:
        kind: of trainer.
        args: its training arguments.
        model: the model.
        rows: the data.
        resume: the folder of a checkpoint.
        more: further arguments of the trainer.
    """
    settings = {"train_dataset": rows, "eval_dataset": rows[:16], "data_collator": collate}
    trainer = kind(model=model, args=args, **{**settings, **more})
    trainer.train(resume_from_checkpoint=resume)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Run(
        trainer,
        [entry["loss"] for entry in logs],
        [entry["grad_norm"] for entry in logs if "grad_norm" in entry],
        trainer.evaluate(),
        {name: value.clone() for name, value in trainer.model.state_dict().items()},
    )


def both(
    folder: Path,
    make: Any,
    rows: list[dict[str, Any]],
    *,
    ort: dict[str, Any] | None = None,
    more: Any = dict,
    **settings: Any,
) -> tuple[Run, Run]:
    """The same training by Trainer and by ORTTrainer.

    Args:
        folder: for output.
        make: makes the model.
        rows: the data.
        ort: settings of ORTTrainer alone.
        more: makes further arguments of the trainers.
        settings: of both.
    """
    plain = train(
        Trainer, arguments(folder / "plain", TrainingArguments, **settings), make(), rows, **more()
    )
    args = arguments(folder / "ort", **settings, **(ort or {}))
    return plain, train(ORTTrainer, args, make(), rows, **more())

"""Where there is a GPU, the trainers train there: recorded graphs meet PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainingArguments

from ortrain import ORTTrainer, ORTTrainingArguments
from tests.trainer.models import arguments, bert, collate, texts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def test_a_training_on_a_gpu_has_trainers_losses_and_no_warning(tmp_path: Path) -> None:
    runs = []
    for kind, of_arguments in ((Trainer, TrainingArguments), (ORTTrainer, ORTTrainingArguments)):
        own = {"ort_engine": "auto", "ort_fallback": "torch"} if kind is ORTTrainer else {}
        args = arguments(tmp_path, of_arguments, use_cpu=False, max_steps=60, **own)
        runs.append(kind(model=bert(), args=args, data_collator=collate, train_dataset=texts(16)))
    plain, ours = runs
    plain.train()
    ours.train()
    losses = [[row["loss"] for row in run.state.log_history if "loss" in row] for run in runs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert len(losses[0]) == 60
    print(ours.ort_report)

"""The trainers on a card: by default the recorded graph meets PyTorch, with Trainer's results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from ortrain import Options, ORTTrainer, ORTTrainerMixin, ORTTrainingArguments
from tests.runtime.aten.recording import Card, install
from tests.trainer.models import arguments, bert, gpt2, t5, texts, train

pytestmark = pytest.mark.usefixtures("graph_wins")


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """The CPU in the place of a card; graphs and recordings may take as long as they will."""
    monkeypatch.setattr("ortrain.frontend.policy.SHARE", 1e9)
    monkeypatch.setattr("ortrain.frontend.autotune.Duel._look_early", lambda *_: None)
    return install(monkeypatch)


class Mixed(ORTTrainerMixin, Trainer):
    """Any trainer, through a graph."""


@pytest.mark.parametrize("mixed", [False, True], ids=["ORTTrainer", "the mixin"])
@pytest.mark.parametrize(
    ("model", "kind", "settings"),
    [
        (bert, "classes", {}),
        (bert, "classes", {"gradient_accumulation_steps": 2, "max_grad_norm": 0.01}),
        (bert, "classes", {"bf16": True}),
        (gpt2, "copy", {}),
        (t5, "copy", {"activation_checkpointing": True}),
    ],
    ids=["bert", "bert accumulated and clipped", "bert in bfloat16", "gpt2", "t5 with checkpoints"],
)
def test_a_training_on_a_card_is_trainers_and_nobody_is_warned(
    tmp_path: Path,
    card: Card,
    model: Callable[[], Any],
    kind: str,
    settings: dict[str, Any],
    mixed: bool,
) -> None:
    rows = [row for row in texts(96, kind) if len(row["input_ids"]) == 9] * 4
    settings = {"max_steps": 24, **settings}
    plain = train(Trainer, arguments(tmp_path, TrainingArguments, **settings), model(), rows)
    if mixed:
        args = arguments(tmp_path, TrainingArguments, **settings)
        ours = train(Mixed, args, model(), rows, options=Options(skip_padding=False))
    else:
        own = {"ort_engine": "auto", "ort_fallback": "torch", "skip_padding": False, **settings}
        ours = train(ORTTrainer, arguments(tmp_path, ORTTrainingArguments, **own), model(), rows)
    rel = 3e-2 if settings.get("bf16") else 1e-4
    assert ours.losses == pytest.approx(plain.losses, rel=rel)
    assert ours.metrics["eval_loss"] == pytest.approx(plain.metrics["eval_loss"], rel=rel)
    report = ours.trainer.ort_report
    assert report.graph_calls > 8
    assert card.replayed > 8
    assert report.training.contest.winner == "graph"
    assert torch.isfinite(torch.tensor(ours.norms)).all()

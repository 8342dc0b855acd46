"""transformers' own Trainer with an ORTModule saves, evaluates and resumes as with the model."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from ortrain import Options, ORTModule
from tests.breadth import sampled

KINDS = (BertForSequenceClassification, BertForMaskedLM)  # the second with tied weights


def rows(kind: type) -> list[dict[str, Any]]:
    dice = torch.Generator().manual_seed(0)
    found = []
    for i in range(8):
        ids = torch.randint(1, 50, (6,), generator=dice)
        found.append({"input_ids": ids, "labels": torch.tensor(i % 2) if kind is KINDS[0] else ids})
    return found


def trained(kind: type, folder: Path, *, wraps: bool) -> Trainer:
    torch.manual_seed(0)
    model: Any = kind(
        BertConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            vocab_size=50, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
    if wraps:
        model = ORTModule(model, options=Options(engine="aten"))
    args = TrainingArguments(
        str(folder), max_steps=4, save_steps=2, use_cpu=True, report_to="none", disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=rows(kind), eval_dataset=rows(kind))
    trainer.train()
    return trainer


@pytest.mark.parametrize("kind", sampled(KINDS, KINDS[1:]))
def test_what_it_writes_and_evaluates_is_that_of_the_model(kind: Any, tmp_path: Path) -> None:
    ours = trained(kind, tmp_path / "ours", wraps=True)
    eager = trained(kind, tmp_path / "eager", wraps=False)
    assert ours.model.report.mode == "graph"
    for each in ("checkpoint-2", "checkpoint-4"):
        mine, theirs = tmp_path / "ours" / each, tmp_path / "eager" / each
        assert {p.name for p in mine.iterdir()} == {p.name for p in theirs.iterdir()}
    mine, theirs = ours.evaluate()["eval_loss"], eager.evaluate()["eval_loss"]
    assert mine == pytest.approx(theirs, rel=1e-4)
    ours.save_model(str(tmp_path / "saved"))
    loaded = kind.from_pretrained(tmp_path / "saved")
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor, ours.model.state_dict()[name], rtol=0, atol=0)
    ours.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))


def test_an_ortmodule_is_one_and_also_of_the_class_that_trainers_ask_for() -> None:
    config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    model = ORTModule(BertForMaskedLM(config))
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(each) is ORTModule
        assert isinstance(each, ORTModule)
        assert isinstance(each, PreTrainedModel)
    assert repr(model).startswith("ORTModule(")
    other = ORTModule(nn.Sequential(nn.Linear(2, 2)))
    assert other.__class__ is ORTModule
    assert not isinstance(other, nn.Sequential)

"""Trainings with their padding and without, on a model that is too small to measure anything."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import padding
import pytest
import readme
import torch
import workloads
from torch import nn
from workloads import Workload

from ortrain.step import tokens


class Output(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


class Reader(nn.Module):
    """A sum of real words after a product with each; takes what a BERT takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.hidden = nn.Embedding(30522, 8), nn.Linear(8, 64)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(64, 2)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> Output:
        words = self.dropout(torch.tanh(self.hidden(self.embedding(input_ids))))
        logits = self.head((words * attention_mask.unsqueeze(-1)).sum(1))
        return Output(nn.functional.cross_entropy(logits, labels), logits)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model, whose padding is left out all the same."""
    monkeypatch.setattr(workloads, "minilm_model", Reader)
    monkeypatch.setattr(tokens, "LEAST", 0)


def test_drawn_sentences_are_as_long_as_those_of_the_data() -> None:
    sentences = padding.drawn(4000)
    assert sentences[:9] == padding.drawn(9)
    lengths = sorted(len(each.ids) for each in sentences)
    quartiles = statistics.quantiles(lengths, n=4)
    for ours, theirs in zip(quartiles, padding.QUANTILES[5::5], strict=False):
        assert abs(ours - theirs) <= 1
    assert 3 <= lengths[0] <= 5
    assert 60 < lengths[-1] <= 67
    assert 0.3 < statistics.mean(each.label for each in sentences) < 0.7


@pytest.mark.parametrize("length", [0, 128])
def test_batches_are_as_long_as_their_longest_or_as_asked(length: int) -> None:
    sentences = padding.drawn(70)
    found = padding.batches(sentences, length)
    assert [len(batch["labels"]) for batch in found] == [32, 32, 6]
    for number, batch in enumerate(found):
        some = sentences[32 * number :][:32]
        lengths = [len(each.ids) for each in some]
        assert batch["input_ids"].shape[1] == (length or max(lengths))
        assert batch["attention_mask"].sum(1).tolist() == lengths
        assert not batch["input_ids"][batch["attention_mask"] == 0].any()
        assert batch["labels"].tolist() == [each.label for each in some]


def test_a_model_without_dropout_has_none() -> None:
    for dropout in (True, False):
        module = padding.classifier(None, dropout)
        (layer,) = (each for each in module.modules() if isinstance(each, nn.Dropout))
        assert module.training
        assert (layer.p > 0) == dropout


def workload(dropout: bool = True) -> Workload:
    given = padding.batches(padding.drawn(96), 0)
    return Workload(title="small", make=lambda: (padding.classifier(None, dropout), given))


NAMES = padding.CONTESTS["fp32"]


def test_both_have_the_same_losses_at_the_same_weights() -> None:
    apart = padding.losses_at_the_same_weights(NAMES, workload(), 4)
    assert len(apart) == 4
    assert max(apart) < 1e-5


def test_both_answer_alike() -> None:
    held_out = padding.batches(padding.drawn(40), 0)
    found = padding.answers(NAMES, workload(dropout=False), held_out, 3)
    assert found["sentences"] == 40
    assert found["other_answers"] == 0
    assert found["logits_apart"] < 1e-4


def test_losses_that_differ_are_told() -> None:
    ones = [torch.tensor(1.0), torch.tensor(2.0)]
    assert padding.differences(ones, [torch.tensor(1.0), torch.tensor(4.0)]) == [0.0, 0.5]


def test_steps_of_all_contestants_are_timed_and_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(padding, "SENTENCES", 80)
    monkeypatch.setattr(padding, "TURN", 2)
    file = tmp_path / "amd-zen5" / "padding.json"
    narrow = ["--paddings", "longest", "--precisions", "fp32", "--checked", "2", "--steps", "5"]
    monkeypatch.setattr(sys, "argv", [padding.__file__, "--json", str(file), *narrow])
    padding.main()
    ((setting, found),) = json.loads(file.read_text())["settings"].items()
    rows = found["contestants"]
    assert [*rows] == [*NAMES]
    assert rows["aten"]["left_out"] > 0.2 > rows["aten-whole"]["left_out"]
    assert 0.3 < rows["aten"]["densities"]["real"] < 0.7
    assert rows["aten"]["losses_apart"]["first"] < 1e-5
    assert rows["eager"]["total_s"] == pytest.approx(5 * rows["eager"]["median_ms"] / 1e3, rel=20)
    told = capsys.readouterr().out
    assert "left out (" in told
    assert "0 of 8 held-out sentences answered otherwise" in told
    page = readme.contestants(readme.load(tmp_path))
    assert f"| {setting} | `amd-zen5` |" in page
    assert "| answers | 0 of 8 held-out sentences otherwise |" in page


def test_what_cannot_be_measured_is_left_out_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object) -> None:
        raise ValueError("no\nmore")

    monkeypatch.setattr(padding, "SENTENCES", 80)
    monkeypatch.setattr(padding, "measure", refused)
    file = tmp_path / "padding.json"
    monkeypatch.setattr(sys, "argv", [padding.__file__, "--json", str(file)])
    padding.main()
    assert capsys.readouterr().out.count("skipped: ValueError: no\n") == 4
    assert not file.exists()


def test_a_file_of_sentences_is_read_with_a_tokenizer(tmp_path: Path) -> None:
    from tests.cli.tiny import make_model

    make_model(tmp_path / "model")
    data = tmp_path / "train.tsv"
    data.write_text("sentence\tlabel\nthe film was good\tb\na bad plot\ta\n")
    first, second = padding.read(data, str(tmp_path / "model"))
    assert (len(first.ids), first.label) == (6, 1)
    assert (len(second.ids), second.label) == (5, 0)

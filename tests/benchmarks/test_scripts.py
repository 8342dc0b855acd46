"""The scripts run to their end, on models that are too small to measure anything."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import batching
import contest
import contestants
import first_step
import gpu
import hostile
import lengths
import loss_curve
import measurement
import memory
import pytest
import step
import torch
import trainer
import whole_runs
import workloads
from torch import nn

import examples
from ortrain.frontend.policy import Policy
from tests.cli.tiny import make_model


class Words(nn.Module):
    """A bag of words that takes what a BERT takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(30522, 2)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.embedding(input_ids), labels)}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs a script with these arguments; what it has written."""
    monkeypatch.setattr(workloads, "minilm_model", Words)
    file = tmp_path / "results.json"

    def start(script: Any, *arguments: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [script.__file__, "--json", str(file), *arguments])
        script.main()
        found: dict[str, Any] = json.loads(file.read_text())
        assert found.pop("machine")["torch"] == torch.__version__
        return found

    return start


def test_steps_are_measured_and_told(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("mlp", "--rounds", "1", "--seconds", "0.01", "--contestants")
    found = run(step, *arguments, "eager-bf16-products")["workloads"]["mlp"]
    assert [*found["contestants"]] == ["eager", "eager-bf16-products", "eager-bf16"]
    assert found["title"] in capsys.readouterr().out


def test_a_peak_is_that_of_a_process_of_its_own() -> None:
    assert memory.peak("mlp", "eager")["peak"] > 0


def test_names_that_are_not_known_are_refused(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for script, arguments in (
        (step, ["bart"]),
        (step, ["--contestants", "onnx"]),
        (memory, ["bart"]),
        (contest, ["bart"]),
        (contest, ["--contestants", "eager"]),
        (first_step, ["--contestants", "eager"]),
        (examples, ["bart"]),
    ):
        with pytest.raises(SystemExit):
            run(script, *arguments)
        assert f"{arguments[-1]}: expected one of " in capsys.readouterr().err


def test_the_cost_of_a_contest_is_told_with_its_share(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Policy, "_pays", lambda *_: True)
    monkeypatch.setattr(
        contest,
        "in_a_process",
        lambda _, workload, name, steps, told: contest.child(
            workload, name, int(steps), bool(told)
        ),
    )
    found = run(contest, "mlp", "--steps", "400", "--told", "--contestants", "auto")
    row = found["400_steps_told"]["mlp"]["auto"]
    assert 0 < row["cost"] < row["seconds"]
    assert row["share"] == row["cost"] / row["seconds"]


# --- lengths --------------------------------------------------------------------------------------


def test_lengths_are_drawn_alike_and_of_the_range() -> None:
    drawn = lengths.drawn(300)
    assert drawn[:5] == lengths.drawn(5)
    assert (min(drawn), max(drawn)) == (20, 128)


def test_steps_of_random_lengths_are_compared_with_one_length(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workloads, "loss_of", lambda output: output["loss"])
    monkeypatch.setattr("contestants.loss_of", lambda output: output["loss"])
    found = run(lengths, "--steps", "3", "--rounds", "1", "--contestants", "ort", "aten-bf16")
    rows = found["contestants"]
    assert [*rows] == ["eager", "eager-bf16", "ort", "aten-bf16"]
    assert rows["eager"]["captures"] == 0
    assert rows["ort"]["captures"] == 1
    assert rows["ort"]["first_pass_s"] > 0
    assert rows["ort"]["ratio_fixed_length"] > 0


# --- loss curves ----------------------------------------------------------------------------------


def test_loss_curves_are_compared_with_eagers(run: Any, tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    data = tmp_path / "train.tsv"
    texts = [
        f"the {'film' if i % 3 else 'plot'} was {'good' if i % 2 else 'bad'}" for i in range(40)
    ]
    rows = [f"{text}\t{number % 2}\n" for number, text in enumerate(texts)]
    data.write_text("sentence\tlabel\n" + "".join(rows))
    arguments = ["--data", str(data), "--model", str(tmp_path / "model"), "--seeds", "2"]
    sizes = ["--steps", "3", "--batch", "12", "--contestants", "eager-bf16"]
    found = run(loss_curve, *arguments, *sizes)
    told = found["contestants"]
    assert [*told] == ["eager", "eager-bf16", "another seed"]
    assert told["eager"]["largest"] == 0
    assert 0 < told["eager-bf16"]["mean"] <= told["eager-bf16"]["largest"]
    assert told["another seed"]["mean"] > told["eager-bf16"]["mean"]
    assert [len(losses) for losses in found["losses"]["eager-bf16"]] == [3, 3]
    assert all(0 <= share <= 1 for share in told["eager"]["accuracies"])
    assert found["examples"] == 36


def test_a_contestant_that_cannot_train_is_left_out(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(name: str, *more: Any) -> dict[str, Any]:
        if name == "ort":
            raise ValueError("no\nmore")
        return {"losses": [1.0], "accuracy": 1.0}

    monkeypatch.setattr(loss_curve, "train", train)
    arguments = ["--model", "any", "--steps", "1", "--seeds", "1", "--contestants", "ort"]
    rows = run(loss_curve, *arguments)["contestants"]
    assert rows["ort"] == {"skipped": "ValueError: no"}
    assert "another seed" not in rows


def test_distances_are_medians_over_the_seeds() -> None:
    zeros = [{"losses": [0.0] * 40}] * 3
    curves = [{"losses": [size, -size] * 20} for size in (1.0, 2.0, 9.0)]
    found = loss_curve.distances(curves, zeros)
    assert found == {"mean": 2, "largest": 2, "smoothed": 0}


def test_synthetic_reviews_are_always_the_same_and_mostly_right() -> None:
    examples_made = loss_curve.synthetic(2000)
    assert examples_made[:50] == loss_curve.synthetic(50)
    assert {example.label for example in examples_made} == {"0", "1"}
    one_word = [e for e in examples_made if e.text.count(" is ") == 1]
    right = sum((e.text.split()[-1] in loss_curve.PRAISE) == (e.label == "1") for e in one_word)
    assert 0.9 < right / len(one_word) < 1


# --- trainers -------------------------------------------------------------------------------------


def test_texts_are_padded_to_their_longest() -> None:
    texts = trainer.Texts(3)
    batch = trainer.padded([texts[0], texts[1], texts[2]])
    sizes = [len(texts[number]["input_ids"]) for number in range(len(texts))]
    assert batch["input_ids"].shape == (3, max(sizes))
    assert batch["attention_mask"].sum(1).tolist() == sizes
    assert torch.equal(texts[1]["input_ids"], trainer.Texts(9)[1]["input_ids"])


def test_whole_trainings_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "minilm_model", Words)
    for name in trainer.TRAINERS:
        found = trainer.child(name, "fp32", "torch", "3")
        assert found["seconds"] > 0
        assert found["ran"].startswith("ORTTrainer: " if name == "ORTTrainer" else "")
        if name == "ORTTrainer":
            assert "of 3 forwards" in found["ran"]


def test_each_length_of_a_training_is_a_run_of_its_own(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(script: str, name: str, precision: str, engine: str, steps: str) -> Any:
        slow = 2 if name == "Trainer" else 1
        return {"seconds": slow * int(steps), "ran": f"{precision}, {engine}"}

    monkeypatch.setattr(trainer, "in_a_process", timed)
    found = run(trainer, "--steps", "3", "5", "--precisions", "bf16", "--rounds", "2")
    assert found["precisions"] == {
        "bf16": {
            steps: {
                "Trainer_s": 2 * int(steps),
                "ORTTrainer_s": int(steps),
                "ratio": 0.5,
                "ran": "bf16, auto",
            }
            for steps in ("3", "5")
        }
    }


# --- examples -------------------------------------------------------------------------------------


EXAMPLE = """
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if given["--engine"] == "aten":
    raise SystemExit(f"--engine aten: expected another with {given['--max_steps']}")
run = {"samples_per_second": len(given["--engine"]), "train_seconds": 1}
open(given["--json_file"], "w").write(json.dumps([run]))
"""


def test_each_engine_runs_an_example_and_one_that_fails_is_left_out(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "translation.py").write_text(EXAMPLE)
    monkeypatch.setattr(examples, "FOLDER", tmp_path)
    found = run(examples, "translation", "--arguments=--max_steps 9", "--rounds", "2")
    rows = found["examples"]["translation"]
    assert [*rows] == ["fp32", "bf16"]
    assert rows["bf16"]["ort"]["samples_per_second"] == len("onnxruntime")
    assert rows["fp32"]["aten"] == {"skipped": "--engine aten: expected another with 9"}
    assert found["arguments"] == ["--max_steps", "9"]


def test_gains_are_of_steps_and_of_whole_trainings() -> None:
    eager = {"samples_per_second": 2.0, "train_seconds": 6.0}
    rows = {"eager": eager, "ort": {"samples_per_second": 3.0, "train_seconds": 5.0}}
    assert examples.gain(rows, "ort") == 1.5
    assert examples.gain(rows, "ort", "train_seconds") == 1.2
    assert examples.gain(rows, "aten") is None
    text = examples.table(
        {"x": {"fp32": {**rows, "aten": {"skipped": "no"}}}}, ["eager", "ort", "aten"]
    )
    assert text.endswith("| `x.py`, fp32 | 2 | **1.50x**, 1.20x with the first steps | no |")


def test_whole_runs_are_told_by_their_steps(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_runs, "STEPS", (1, 3))
    monkeypatch.setattr(
        whole_runs, "in_a_process", lambda script, *arguments: whole_runs.child(*arguments)
    )
    found = run(whole_runs, "mlp", "--contestants", "eager", "aten")["workloads"]["mlp"]
    assert [*found["aten"]["seconds"]] == ["0", "1", "3"]
    assert found["eager"]["ratio"] == {"1": 1.0, "3": 1.0}
    assert found["aten"]["graph_calls"] == 3


def test_sentences_are_grouped_and_packed(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("contestants.loss_of", lambda output: output["loss"])
    monkeypatch.setattr(batching, "NAMES", {"fp32": ("eager",)})
    found = run(batching, "classifier", "--precisions", "fp32", "--sentences", "512")["models"]
    rows = found["classifier, fp32"]
    assert rows["eager, grouped"]["real"] > rows["eager, padded"]["real"]
    assert "words/s" in capsys.readouterr().out
    sentences = batching.drawn(64)
    some = batching.packed(sentences)
    assert len(some) == 2
    assert some[0]["input_ids"].shape == (1, sum(len(each.ids) for each in sentences[:32]))
    assert (some[0]["position_ids"] == 0).sum() == 32


def test_a_graph_has_taken_over_where_nine_calls_in_ten_are_its_own() -> None:
    assert contestants.taken_over([0, 1, 1, 2, 3, 4]) == 4
    assert contestants.taken_over([1, 2, 3, 4, 5, 6, 7, 8, 8, 9]) == 1
    assert contestants.taken_over([0, 0]) is None


def test_hostile_runs_are_told_by_kind(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile, "STEPS", 2)
    monkeypatch.setattr(
        hostile, "in_a_process", lambda script, *arguments: hostile.child(*arguments)
    )
    found = run(hostile, "attribute", "--contestants", "eager", "aten")["kinds"]["attribute"]
    assert found["aten"]["graph_calls"] == 2
    assert found["aten"]["loss"] == pytest.approx(found["eager"]["loss"], rel=1e-4)


@pytest.mark.parametrize("kind", [*hostile.CHANGES])
def test_each_change_leaves_a_model_that_runs(kind: str) -> None:
    model, change = hostile.Model(), hostile.CHANGES[kind]
    for number in range(4):
        if change is not None:
            change(model, number)
        model(torch.randn(2, 3, 128)).backward()


def test_a_cell_is_measured_and_told() -> None:
    row = gpu.child(gpu.Cell("actor-critic", "aten", 2, "cpu"), 1)
    assert row["ran"] == "graph (aten on cpu)"
    assert row["flops"] > 2 * 64 * (64 * 256 + 256 * 256)
    half = {"flops": 989e12 / 2, "median_ms": 1000.0, "first_step_s": 1.0, "ran": ""}
    assert "50.0% of the card" in gpu.told(half, "NVIDIA H100 80GB HBM3")
    assert "of the card" not in gpu.told(half, "another")
    assert gpu.missing(gpu.Cell("mlp", "aten-graphs", device="cpu")) == "only on cuda"


def test_the_first_cells_are_those_of_most_worth_and_each_is_there_once() -> None:
    cells = [*gpu.cells()]
    first = [*gpu.defaults()]
    assert cells[: len(first)] == first
    assert {name.contestant for name in first if name.model == "bert-base"} == {
        f"{name}{end}"
        for name in ("eager", "compile", "compile-graphs", "auto")
        for end in ("", "-bf16")
    }
    assert gpu.Cell(gpu.TRAINED, "ORTTrainer-bf16", 32) in first
    assert len({(cell.key, cell.device) for cell in cells}) == len(cells)
    others = {cell.contestant for cell in cells if cell.model != gpu.TRAINED}
    assert others <= contestants.CONTESTANTS.keys()


def test_what_a_card_was_measured_with_is_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, kind = tmp_path / "results.json", "facts"
    known = {"gpu": "NVIDIA H200", "slug": "nvidia-h200", "driver": "1"}
    facts = measurement.processor.facts
    monkeypatch.setattr(measurement.processor, kind, lambda device: facts() | known)
    monkeypatch.setattr(gpu, "cells", lambda: [gpu.Cell("bert", "eager"), gpu.Cell("gpt2", "aten")])
    monkeypatch.setattr(gpu, "tests", lambda seconds: {"passed": 3})
    asked: list[str] = []

    def measured(cell: gpu.Cell, layers: Any, seconds: float) -> dict[str, Any]:
        asked.append(cell.model)
        return {"failed": "no memory"} if cell.model == "gpt2" else {"median_ms": 1.0, "flops": 1}

    monkeypatch.setattr(gpu, "measured", measured)
    monkeypatch.setattr(gpu, "told", lambda row, name: "")
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--json", str(file)])
    gpu.main()
    known["driver"] = "2"
    gpu.main()
    assert asked == ["bert", "gpt2", "gpt2"]
    assert json.loads(file.read_text())["tests"] == {"passed": 3}

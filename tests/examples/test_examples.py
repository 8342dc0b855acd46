"""The examples train with both engines, from the same weights, to the same metric."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from ortrain.errors import NotServed
from tests.breadth import crossed

FOLDER = Path(__file__).parents[2] / "examples"

# One layer, and no dropout where the architecture has one.
SMALL = "hidden_size=32,intermediate_size=64,num_hidden_layers=1,num_attention_heads=2"
BERT = f"{SMALL},hidden_dropout_prob=0,attention_probs_dropout_prob=0"
MARIAN = "d_model=32,encoder_layers=1,decoder_layers=1,encoder_ffn_dim=64,decoder_ffn_dim=64"
WAV2VEC2 = "hidden_dropout=0,attention_dropout=0,activation_dropout=0,feat_proj_dropout=0"
OVERRIDES = {
    "causal_language_modeling": f"{SMALL},num_key_value_heads=2",
    "image_classification": SMALL,
    "masked_language_modeling": "hidden_size=32,intermediate_size=64,num_attention_heads=2",
    "question_answering": BERT,
    "speech_recognition": f"{SMALL},{WAV2VEC2},final_dropout=0",
    "text_classification": BERT,
    "token_classification": BERT,
    "translation": f"{MARIAN},dropout=0",
}

Run = list[dict[str, Any]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs an example as a script, four steps on data of one and a half epochs; its figures."""
    monkeypatch.syspath_prepend(str(FOLDER))
    figures = tmp_path / "figures.json"
    sizes = {
        "max_steps": 4,
        "per_device_train_batch_size": 8,
        "max_train_samples": 24,
        "max_eval_samples": 16,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "warmup_steps": 0,
    }

    def start(name: str, **more: Any) -> Run:
        settings: dict[str, Any] = {
            "output_dir": tmp_path / "out",
            "json_file": figures,
            **sizes,
            **more,
        }
        settings.setdefault("config_overrides", OVERRIDES[name])
        flags = [f"--{key}={value}" for key, value in settings.items() if value is not None]
        script = FOLDER / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(script), *flags])
        runpy.run_path(str(script), run_name="__main__")
        return json.loads(figures.read_text())

    return start


def test_every_example_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {*OVERRIDES, "common", "quickstart"}


@pytest.mark.parametrize("name", OVERRIDES)
def test_both_engines_come_to_the_same_metric(
    name: str, run: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a training of full size, tokens that nobody reads are left out.
    for least in ("LEAST", "ENOUGH"):
        monkeypatch.setattr(f"ortrain.step.tokens.{least}", 0)
    eager, graph = run(name)
    assert [eager["engine"], graph["engine"]] == ["torch", "onnxruntime"]
    assert [eager["graph_calls"], eager["eager_calls"]] == [0, 4]
    assert [graph["graph_calls"], graph["eager_calls"]] == [4, 0]
    (metric,) = {key for key in eager if key.startswith("eval_")} - {"eval_loss"}
    assert graph[metric] == pytest.approx(eager[metric], abs=1e-6)
    assert graph["eval_loss"] == pytest.approx(eager["eval_loss"], rel=1e-4)
    printed = capsys.readouterr().out
    assert "training: 4 forwards as a graph, 0 in PyTorch" in printed
    assert [row.split()[0] for row in printed.splitlines()[-3:]] == [
        "engine",
        *engines(eager, graph),
    ]


@pytest.mark.parametrize("name", crossed(OVERRIDES, one_in=2))
def test_both_engines_come_to_the_same_loss_in_bfloat16(name: str, run: Any) -> None:
    eager, graph = run(name, bf16=True)
    assert engines(eager, graph) == ["torch", "aten"]
    assert [graph["graph_calls"], graph["eager_calls"]] == [4, 0]
    assert graph["eval_loss"] == pytest.approx(eager["eval_loss"], rel=2e-2)


def engines(*figures: dict[str, Any]) -> list[str]:
    return [each["engine"] for each in figures]


def test_a_training_learns(run: Any) -> None:
    settings = {"max_train_samples": 400, "max_steps": 60, "learning_rate": 5e-3}
    (figures,) = run("causal_language_modeling", engine="onnxruntime", **settings)
    assert figures["eval_accuracy"] > 0.3  # of 0.5 at best, and 0.005 by chance


@pytest.mark.parametrize("name", ["text_classification", "translation"])
def test_a_training_goes_on_with_a_saved_model(name: str, run: Any, tmp_path: Path) -> None:
    (first,) = run(name, engine="torch")
    saved = {"model_name_or_path": tmp_path / "out" / "torch", "config_overrides": None}
    (then,) = run(name, engine="torch", max_steps=1, learning_rate=0, **saved)
    assert then["eval_loss"] == pytest.approx(first["eval_loss"], rel=1e-5)


def test_rows_come_from_files(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    file = tmp_path / "rows.json"
    rows = [{"text": "one two" * (i % 5), "label": i % 3} for i in range(40)]
    file.write_text("\n".join(map(json.dumps, rows)))
    settings = {"engine": "torch", "train_file": file, "max_train_samples": 30}
    (figures,) = run("text_classification", **settings)
    assert figures["eager_calls"] == 4


def test_a_file_of_another_kind_is_refused_by_name(run: Any) -> None:
    with pytest.raises(SystemExit, match=r"rows\.txt: expected a name that ends with \.json"):
        run("text_classification", train_file="rows.txt")


def test_what_cannot_be_a_graph_ends_with_the_reason(run: Any) -> None:
    with pytest.raises(NotServed, match="autocast is on"):
        run("text_classification", engine="onnxruntime", bf16=True)


@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
def test_a_training_that_fell_back_is_no_result(run: Any) -> None:
    with pytest.raises(SystemExit, match=r"fell back to PyTorch: (.|\n)*autocast is on"):
        run("text_classification", engine="onnxruntime", bf16=True, ort_fallback="torch")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "tensorflow"}, "expected one of both, torch, onnxruntime, aten, auto"),
        ({"ort_engine": "torch"}, "say --engine torch in place of --ort_engine"),
    ],
)
def test_wrong_arguments_are_told(
    settings: dict[str, str], message: str, run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run("text_classification", **settings)
    assert message in capsys.readouterr().err

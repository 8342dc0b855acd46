"""Trainings and evaluations in 16 bits run as graphs, as close to float32 as Trainer's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainingArguments

from ortrain import Options, ORTTrainer
from tests.breadth import crossed, sampled
from tests.trainer.models import Run, arguments, bert, both, collate, gpt2, t5, texts, train

IN_16_BITS = {"ort_engine": "aten"}
# Of so few numbers the distance is a matter of luck; the certificate's own factor.
SLACK = 3.0


def distance(found: Sequence[float], expected: Sequence[float]) -> float:
    return math.sqrt(np.mean(np.square(np.subtract(found, expected))))


def assert_as_close(ours: Run, plain: Run, exact: Run) -> None:
    """Losses, norms and the metric are about as far from float32's as Trainer's in 16 bits are."""
    for name in ("losses", "norms"):
        own = distance(getattr(plain, name), getattr(exact, name))
        assert 0 < distance(getattr(ours, name), getattr(exact, name)) < SLACK * own, name
    own = abs(plain.metrics["eval_loss"] - exact.metrics["eval_loss"])
    apart = abs(ours.metrics["eval_loss"] - exact.metrics["eval_loss"])
    assert apart < SLACK * max(own, distance(plain.losses, exact.losses))


def assert_ran_as_a_graph(run: Run, *, calls: int = 6) -> None:
    report = run.trainer.ort_report
    assert (report.graph_calls, report.fallback_calls) == (calls, 0)
    assert report.training.engine.startswith("aten")
    assert report.training.certificate


TRAININGS: dict[str, tuple[Any, str, dict[str, Any], dict[str, Any]]] = {
    "BERT": (bert, "classes", {}, {}),
    "GPT-2": (gpt2, "copy", {}, {}),
    "T5": (t5, "copy", {}, {}),
    "accumulated": (gpt2, "copy", {"gradient_accumulation_steps": 2, "max_steps": 3}, {}),
    "clipped": (bert, "classes", {"max_grad_norm": 0.01}, {}),
    "checkpointed": (bert, "classes", {"activation_checkpointing": True}, {}),
    "loss in the graph": (
        gpt2,
        "copy",
        {"label_smoothing_factor": 0.1},
        {"use_module_with_loss": True},
    ),
}


@pytest.mark.parametrize(("make", "kind", "settings", "ort"), TRAININGS.values(), ids=TRAININGS)
def test_bf16_trains_as_a_graph_as_close_to_float32_as_trainer(
    tmp_path: Path, make: Any, kind: str, settings: dict[str, Any], ort: dict[str, Any]
) -> None:
    rows = texts(kind=kind)
    exact = train(Trainer, arguments(tmp_path, TrainingArguments, **settings), make(), rows)
    plain, ours = both(tmp_path, make, rows, ort=IN_16_BITS | ort, bf16=True, **settings)
    assert_as_close(ours, plain, exact)
    assert_ran_as_a_graph(ours)
    assert all(w.dtype == torch.float32 for w in ours.weights.values() if w.is_floating_point())


def test_fp16_without_a_gpu_is_float32_as_for_trainer(tmp_path: Path) -> None:
    plain, ours = both(tmp_path, bert, texts(), ort=IN_16_BITS, fp16=True)
    assert ours.losses == pytest.approx(plain.losses, rel=2e-6)
    assert_ran_as_a_graph(ours)


def test_a_loss_of_trainers_is_computed_in_float32_in_pytorch_too(tmp_path: Path) -> None:
    ort = {"ort_engine": "torch", "use_module_with_loss": True}
    settings = {"bf16": True, "label_smoothing_factor": 0.1}
    plain, ours = both(tmp_path, gpt2, texts(kind="copy"), ort=ort, **settings)
    assert ours.losses == plain.losses


# --- evaluation ---------------------------------------------------------------------------------


def evaluated(kind: type, args: Any, rows: Any, **more: Any) -> tuple[Any, float, np.ndarray]:
    trainer = kind(bert(), args, collate, rows, eval_dataset=rows)
    loss = trainer.evaluate(**more)["eval_loss"]
    return trainer, loss, trainer.predict(rows, **more).predictions


@pytest.mark.parametrize(
    ("precision", "engine"),
    crossed(["bf16", "bf16_full_eval", "fp16_full_eval"], ["onnxruntime", "aten"], one_in=3),
)
def test_evaluation_in_16_bits_is_a_graph_as_close_to_float32_as_trainers(
    tmp_path: Path, precision: str, engine: str
) -> None:
    rows = texts(20)
    _, loss, exact = evaluated(Trainer, arguments(tmp_path, TrainingArguments), rows)
    settings = {precision: True}
    _, one, plain = evaluated(Trainer, arguments(tmp_path, TrainingArguments, **settings), rows)
    args = arguments(tmp_path, ort_engine=engine, **settings)
    trainer, two, ours = evaluated(ORTTrainer, args, rows, inference_with_ort=True)
    assert ours.dtype == plain.dtype
    assert 0 < distance(ours, exact) < SLACK * distance(plain, exact)
    assert abs(two - loss) < SLACK * max(abs(one - loss), distance(plain, exact))
    report = trainer.ort_report.inference
    assert (report.graph_calls, report.eager_calls) == (6, 0)
    assert report.engine.startswith("aten")
    wanted = {"bf16": torch.float32, "bf16_full_eval": torch.bfloat16}
    assert trainer.model.dtype == wanted.get(precision, torch.float16)


@pytest.mark.parametrize(
    "precision", sampled(["bf16_full_eval", "fp16_full_eval"], ["bf16_full_eval"])
)
def test_evaluation_within_training_is_in_float32_and_in_16_bits_behind_it(
    tmp_path: Path, precision: str
) -> None:
    settings = {precision: True, "eval_strategy": "steps", "eval_steps": 3}
    ort = {"inference_with_ort": True}
    plain, ours = both(tmp_path, bert, texts(), ort=ort, **settings)
    during, expected = (
        [log["eval_loss"] for log in run.trainer.state.log_history if "eval_loss" in log]
        for run in (ours, plain)
    )
    assert during[:2] == pytest.approx(expected[:2], rel=2e-6)
    assert ours.metrics["eval_loss"] == pytest.approx(plain.metrics["eval_loss"], rel=1e-2)
    report = ours.trainer.ort_report.inference
    assert (report.graph_calls, report.eager_calls) == (6, 0)
    assert report.engine.startswith("aten")


# --- NEFTune ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "bf16"),
    [
        pytest.param("onnxruntime", False, marks=pytest.mark.breadth),
        ("aten", True),
        pytest.param("aten", False, marks=pytest.mark.breadth),
    ],
)
def test_the_noise_of_neftune_is_between_graphs(tmp_path: Path, engine: str, bf16: bool) -> None:
    runs = []
    for alpha in (None, 5.0):
        settings = {"neftune_noise_alpha": alpha, "bf16": bf16, "max_steps": 4}
        args = arguments(tmp_path, ort_engine=engine, **settings)
        runs.append(train(ORTTrainer, args, bert(), texts()))
        report = runs[-1].trainer.ort_report
        assert (report.graph_calls, report.fallback_calls) == (4, 0)
        assert report.training.certificate
    quiet, noisy = runs
    assert noisy.losses != quiet.losses
    assert noisy.losses == pytest.approx(quiet.losses, rel=0.1)
    # Behind the training Trainer takes the hook off, and nothing is added.
    model = noisy.trainer.model
    again = Trainer(model, arguments(tmp_path, TrainingArguments, bf16=bf16), collate)
    expected = again.evaluate(texts()[:16])["eval_loss"]
    assert noisy.metrics["eval_loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("precision", sampled(["bf16", "bf16-products"], ["bf16"]))
def test_the_options_own_precision_evaluates_in_pytorchs_operators(
    tmp_path: Path, precision: Any
) -> None:
    options = Options(engine="aten", fallback="raise", precision=precision)
    rows = texts(16)
    args = arguments(tmp_path, max_steps=2)
    trainer = ORTTrainer(bert(), args, collate, rows, eval_dataset=rows, options=options)
    trainer.train()
    expected = trainer.evaluate()["eval_loss"]
    found = trainer.evaluate(inference_with_ort=True)["eval_loss"]
    assert found == pytest.approx(expected, rel=1e-2)
    report = trainer.ort_report.inference
    assert (report.graph_calls, report.eager_calls) == (2, 0)
    assert report.engine.startswith("aten")

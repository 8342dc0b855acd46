"""A quantized model that its nodes cannot save is trained for its quantization."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from ortrain.deploy import Budgets, EquivalenceError, EquivalenceReport, GoldenSet
from ortrain.deploy.quantization import (
    AutoCalibrationConfig,
    AutoQuantizationConfig,
    FineTuning,
    ORTQuantizer,
    QuantizationConfig,
    WeightOnlyConfig,
)
from ortrain.deploy.quantization.publication import FINE_TUNING
from ortrain.errors import InputError
from ortrain.ondevice.running.train_step import TrainStep
from tests.deploy.quantization.models import (
    answers,
    checksums,
    classifier,
    generator,
    ids,
    operators,
    saved,
)

STATIC = AutoQuantizationConfig.avx512_vnni(is_static=True, per_channel=False)
BUDGETS = Budgets(max_metric_drop=0.25)
SETTINGS = FineTuning(steps=100, learning_rate=3e-3)
# Of what calibration finds, too little: values are cut off, as with examples that are too few.
NARROW = 0.3


def labelled(path: Path, batches: list[dict[str, np.ndarray]]) -> GoldenSet:
    """Batches with what the model itself says of them."""
    labels = [answers(path, batch)[0].argmax(-1) for batch in batches]
    return GoldenSet(batches, labels=np.concatenate(labels))


def golden(path: Path) -> GoldenSet:
    return labelled(path, [ids(16, 6, seed) for seed in range(4)])


def training(path: Path, count: int = 24) -> GoldenSet:
    return labelled(path, [ids(16, 6, 100 + seed) for seed in range(count)])


def narrow(quantizer: ORTQuantizer) -> dict[str, tuple[float, float]]:
    found = quantizer.fit([ids(16, 6, 50)], AutoCalibrationConfig.minmax())
    return {name: (low * NARROW, high * NARROW) for name, (low, high) in found.items()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return classifier(tmp_path / "a")


@pytest.fixture
def quantizer(path: Path) -> ORTQuantizer:
    return ORTQuantizer.from_pretrained(path.parent)


def recovered(
    quantizer: ORTQuantizer, path: Path, target: Path, data: Any, **more: Any
) -> EquivalenceReport:
    given = {
        "calibration_tensors_range": narrow(quantizer),
        "validate": golden(path),
        "budgets": BUDGETS,
        "on_fail": "recover",
        "max_excluded": 0,
        "training_data": data,
        "fine_tuning": SETTINGS,
    }
    quantizer.quantize(STATIC, target, **{**given, **more})
    return EquivalenceReport.load(target)


def test_training_recovers_what_leaving_nodes_out_may_not(
    quantizer: ORTQuantizer, path: Path, tmp_path: Path
) -> None:
    before = checksums(path.parent)
    with pytest.raises(EquivalenceError, match="max_metric_drop"):
        recovered(quantizer, path, tmp_path / "b", None, fine_tuning=None)
    report = recovered(quantizer, path, tmp_path / "b", training(path))
    assert report.passed
    after = tmp_path / "b" / "model_quantized.onnx"
    assert operators(after)["QuantizeLinear"] > 3
    written = json.loads((tmp_path / "b" / FINE_TUNING).read_text())
    assert written["objective"] == "0.5 cross entropy + 0.5 divergence"
    assert (written["steps"], written["rows"], written["seed"]) == (100, 384, 0)
    assert written["loss_after"] < written["loss_before"] - 0.1
    first, second = report.notes[-2:]
    assert first == "outside the budgets at first; no node was left out"
    assert second.startswith(
        "fine-tuned with rounded weights and activations on 384 rows: 100 steps"
    )
    accuracy = report.overall.after["accuracy"]
    assert f"→ {accuracy:.4g} (before quantization 1)" in second
    assert checksums(path.parent) == before


def test_training_ends_early_where_its_own_data_keep_the_budgets(
    quantizer: ORTQuantizer, path: Path, tmp_path: Path
) -> None:
    settings = dataclasses.replace(SETTINGS, steps=200, stop_early=True)
    report = recovered(quantizer, path, tmp_path / "b", training(path), fine_tuning=settings)
    written = json.loads((tmp_path / "b" / FINE_TUNING).read_text())
    assert written["enough"]
    assert written["steps"] in range(25, 200, 25)
    assert report.passed
    assert f"{written['steps']} steps of 200, enough for its own data" in report.notes[-1]


def test_without_labels_the_original_is_learnt(
    quantizer: ORTQuantizer, path: Path, tmp_path: Path
) -> None:
    data = list(training(path).batches)
    report = recovered(quantizer, path, tmp_path / "b", data)
    assert report.passed
    assert json.loads((tmp_path / "b" / FINE_TUNING).read_text())["objective"] == "divergence"


def test_dynamic_quantization_is_recovered_too(tmp_path: Path) -> None:
    path = classifier(tmp_path / "a")
    model = onnx.load(path)
    for weight in model.graph.initializer:
        if weight.name in ("w0", "w1"):
            # One column is far larger than the others, which have few steps left of one range.
            array = onnx.numpy_helper.to_array(weight).copy()
            array[:, 0] *= 60
            weight.CopyFrom(onnx.numpy_helper.from_array(array, weight.name))
    onnx.save(model, path)
    quantizer = ORTQuantizer.from_pretrained(path.parent)
    config = AutoQuantizationConfig.avx2(is_static=False, per_channel=False, reduce_range=True)
    budgets = Budgets(max_metric_drop=0.12)
    with pytest.raises(EquivalenceError, match="max_metric_drop"):
        quantizer.quantize(config, tmp_path / "b", validate=golden(path), budgets=budgets)
    quantizer.quantize(
        config,
        tmp_path / "b",
        validate=golden(path),
        budgets=budgets,
        on_fail="recover",
        max_excluded=0,
        training_data=training(path),
        fine_tuning=SETTINGS,
    )
    assert EquivalenceReport.load(tmp_path / "b").passed


def test_nodes_are_left_out_first_and_nothing_is_trained_where_that_is_enough(
    quantizer: ORTQuantizer, path: Path, tmp_path: Path
) -> None:
    report = recovered(
        quantizer, path, tmp_path / "b", training(path), max_excluded=None, fine_tuning=None
    )
    assert any("stayed as they were" in note for note in report.notes)
    assert not (tmp_path / "b" / FINE_TUNING).exists()


def test_what_was_tried_is_told_in_order_and_nothing_is_written(
    quantizer: ORTQuantizer, path: Path, tmp_path: Path
) -> None:
    impossible = Budgets(max_abs_diff=1e-9)
    few = FineTuning(steps=2)
    with pytest.raises(EquivalenceError) as caught:
        recovered(
            quantizer,
            path,
            tmp_path / "b",
            training(path, 2),
            budgets=impossible,
            max_excluded=1,
            fine_tuning=few,
        )
    excluded, trained = caught.value.report.notes[-2:]
    assert excluded.startswith("leaving out 1 of ")
    assert "was not enough" in excluded
    assert "2 steps, learning rate 5e-05, of ranges 0.01, seed 0, 0.5 cross entropy + " in trained
    assert excluded in str(caught.value)
    assert trained in str(caught.value)
    assert not (tmp_path / "b").exists()


def test_without_training_data_the_report_says_so(
    quantizer: ORTQuantizer, path: Path, tmp_path: Path
) -> None:
    with pytest.raises(EquivalenceError, match="there were no training data") as caught:
        recovered(quantizer, path, tmp_path / "b", None, fine_tuning=None)
    assert any("no training data" in note for note in caught.value.report.notes)
    assert not (tmp_path / "b").exists()


def test_an_interrupted_training_leaves_nothing(
    quantizer: ORTQuantizer, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    call = TrainStep.__call__

    def interrupted(self: TrainStep, *inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return call(self, *inputs)

    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(TrainStep, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recovered(quantizer, path, tmp_path / "b", training(path, 4))
    assert calls == 3
    assert not (tmp_path / "b").exists()
    assert list(temporary.iterdir()) == []


def test_a_model_without_gradients_is_told_and_not_written(tmp_path: Path) -> None:
    rng = generator()
    weights = {"w": rng.standard_normal((8, 8), dtype=np.float32)}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], name="product"),
        helper.make_node("FastGelu", ["m"], ["y"], name="gelu", domain="com.microsoft"),
    ]
    inputs = {"x": (TensorProto.FLOAT, ["n", 8])}
    saved(tmp_path / "a", nodes, inputs, {"y": TensorProto.FLOAT}, weights)

    def batch(seed: int) -> dict[str, np.ndarray]:
        return {"x": generator(seed).standard_normal((4, 8), dtype=np.float32)}

    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a")
    with pytest.raises(EquivalenceError, match=r"fine-tuning was not possible: .*FastGelu"):
        quantizer.quantize(
            AutoQuantizationConfig.avx2(is_static=False),
            tmp_path / "b",
            validate=GoldenSet([batch(0)]),
            budgets=Budgets(max_abs_diff=1e-6),
            on_fail="recover",
            training_data=[batch(1)],
        )
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "the training data are empty"),
        ([{"words": np.ones((4, 6), np.int64)}], "cannot be told of an element of the training"),
        (
            GoldenSet([{"words": np.ones((4, 6), np.int64)}]),
            "the training data has no input 'input_ids'",
        ),
        (
            [{"input_ids": np.ones((2, 6), np.int64), "labels": np.array([0, 4])}],
            "row 1 of a batch of the training data has the label 4, which is no class",
        ),
    ],
)
def test_training_data_that_do_not_fit_are_told(
    data: Any, message: str, quantizer: ORTQuantizer, path: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        recovered(quantizer, path, tmp_path / "b", data)
    assert not (tmp_path / "b").exists()


def test_the_golden_set_is_no_training_data(
    quantizer: ORTQuantizer, path: Path, tmp_path: Path
) -> None:
    judging = golden(path)
    with pytest.raises(InputError, match="are the golden set itself"):
        recovered(quantizer, path, tmp_path / "b", judging, validate=judging)
    with pytest.raises(InputError, match="have 64 of the 64 different rows"):
        recovered(quantizer, path, tmp_path / "b", list(judging.batches), validate=judging)


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        (STATIC, {"on_fail": "refuse", "max_excluded": None}, "training_data are for recovery"),
        (WeightOnlyConfig(), {}, "weights are trained for eight bits alone"),
        (STATIC, {"training_data": None}, "fine_tuning is of a training"),
        (STATIC, {"max_excluded": -1}, "max_excluded=-1: expected a number from 0 up"),
    ],
)
def test_arguments_that_do_not_go_together_are_told(
    config: QuantizationConfig,
    more: dict[str, Any],
    message: str,
    quantizer: ORTQuantizer,
    path: Path,
    tmp_path: Path,
) -> None:
    given: dict[str, Any] = {
        "calibration_tensors_range": {"logits": (0.0, 1.0)},
        "validate": golden(path),
        "on_fail": "recover",
        "max_excluded": 0,
        "training_data": training(path, 1),
        "fine_tuning": SETTINGS,
    }
    with pytest.raises(ValueError, match=message):
        quantizer.quantize(config, tmp_path / "b", **{**given, **more})
    assert not (tmp_path / "b").exists()

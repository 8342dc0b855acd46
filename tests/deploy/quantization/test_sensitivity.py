"""Which nodes change the answers most, the gate before anything is written, and the recovery."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortrain.deploy import Budgets, EquivalenceError, GoldenSet
from ortrain.deploy.ort_config import ORTConfig
from ortrain.deploy.quantization import (
    AutoCalibrationConfig,
    AutoQuantizationConfig,
    HalfPrecisionConfig,
    ORTQuantizer,
    QuantizationConfig,
    WeightOnlyConfig,
    publication,
    rewrites,
    sensitivity,
)
from tests.deploy.quantization.models import answers, classifier, ids, operators, saved


def dynamic(**more: Any) -> QuantizationConfig:
    return AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=False, **more)


def sensitive(folder: Path, layer: int = 1) -> Path:
    """A classifier of which one product has a weight far larger than all others of it."""
    path = classifier(folder, layers=3)
    model = onnx.load(path)
    for weight in model.graph.initializer:
        if weight.name == f"w{layer}":
            array = numpy_helper.to_array(weight).copy()
            array[0, 0] = 300.0
            weight.CopyFrom(numpy_helper.from_array(array, weight.name))
        if weight.name == f"b{layer}":
            # The large one's output is switched off, so that the others matter.
            array = numpy_helper.to_array(weight).copy()
            array[0] = -3000.0
            weight.CopyFrom(numpy_helper.from_array(array, weight.name))
    onnx.save(model, path)
    return path


def golden(path: Path, rows: int = 16) -> GoldenSet:
    batches = [ids(4, 6, seed) for seed in range(rows // 4)]
    labels = np.concatenate([answers(path, batch)[0].argmax(-1) for batch in batches])
    return GoldenSet(batches, labels=labels)


def test_the_node_that_changes_most_is_the_first(tmp_path: Path) -> None:
    path = sensitive(tmp_path / "a")
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a")
    found = quantizer.sensitivity(dynamic(), golden(path))
    assert {each.node for each in found} == {
        "embedding",
        "product_0",
        "product_1",
        "product_2",
        "classes",
    }
    assert found[0].node == "product_1"
    assert found[0].operator == "MatMul"
    assert found[0].signal_to_noise < found[1].signal_to_noise - 10
    ratios = [each.signal_to_noise for each in found]
    assert ratios == sorted(ratios)
    assert all(each.largest >= each.mean > 0 for each in found)


def test_leaving_the_node_out_that_changes_most_leaves_the_least_change(tmp_path: Path) -> None:
    path = sensitive(tmp_path / "a")
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a")
    found = quantizer.sensitivity(dynamic(), golden(path), mode="excluded")
    assert found[-1].node == "product_1"
    with pytest.raises(ValueError, match="mode='both'"):
        quantizer.sensitivity(dynamic(), golden(path), mode="both")


def test_weights_in_few_bits_are_measured_as_well(tmp_path: Path) -> None:
    path = sensitive(tmp_path / "a")
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a")
    few = quantizer.sensitivity(WeightOnlyConfig(block_size=32), golden(path).batches)
    more = quantizer.sensitivity(WeightOnlyConfig(bits=8), golden(path).batches)
    assert len(few) == len(more) == 5
    by_node = {each.node: each.signal_to_noise for each in more}
    # Each bit halves a step: four bits are 24 dB.
    assert all(15 < by_node[each.node] - each.signal_to_noise < 35 for each in few)


def test_inside_the_budgets_the_model_and_its_report_are_published(tmp_path: Path) -> None:
    path = classifier(tmp_path / "a")
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a")
    quantizer.quantize(
        dynamic(), tmp_path / "b", validate=golden(path), budgets=Budgets(max_abs_diff=2.0)
    )
    names = {each.name for each in (tmp_path / "b").iterdir()}
    assert names == {
        "config.json",
        "equivalence.html",
        "equivalence.json",
        "model_quantized.onnx",
        "ort_config.json",
    }


def test_outside_the_budgets_nothing_is_written_and_no_node_is_measured_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sensitive(tmp_path / "a")
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a")
    measured: list[object] = []
    monkeypatch.setattr(rewrites, "measure", lambda *given: measured.append(given) or [])
    with pytest.raises(EquivalenceError) as caught:
        quantizer.quantize(
            dynamic(), tmp_path / "b", validate=golden(path), budgets=Budgets(max_abs_diff=0.2)
        )
    assert not measured
    assert "on_fail='recover' searches for the nodes" in str(caught.value)
    assert not caught.value.report.passed
    assert not (tmp_path / "b").exists()


def test_recovery_leaves_out_no_more_than_the_nodes_that_are_to_blame(tmp_path: Path) -> None:
    path = sensitive(tmp_path / "a")
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a")
    config = dynamic()
    before = config.to_dict()
    quantizer.quantize(
        config,
        tmp_path / "b",
        validate=golden(path),
        budgets=Budgets(max_abs_diff=0.3),
        on_fail="recover",
    )
    after = tmp_path / "b" / "model_quantized.onnx"
    assert (operators(after)["MatMul"], operators(after)["MatMulInteger"]) == (1, 3)
    written = ORTConfig.from_pretrained(tmp_path / "b").quantization
    assert written["nodes_to_exclude"] == ["product_1"]
    ranked = json.loads((tmp_path / "b" / "sensitivity.json").read_text())
    assert ranked[0]["node"] == "product_1"
    report = json.loads((tmp_path / "b" / "equivalence.json").read_text())
    assert any("product_1" in note for note in report["notes"])
    assert config.to_dict() == before


def test_recovery_that_nothing_helps_is_refused(tmp_path: Path) -> None:
    path = classifier(tmp_path / "a")
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a")
    with pytest.raises(EquivalenceError, match="leaving out 3 of 4 nodes was not enough"):
        quantizer.quantize(
            dynamic(),
            tmp_path / "b",
            validate=golden(path),
            budgets=Budgets(max_abs_diff=1e-9),
            on_fail="recover",
        )
    assert not (tmp_path / "b").exists()


def test_a_static_configuration_recovers_with_the_same_ranges(tmp_path: Path) -> None:
    path = sensitive(tmp_path / "a")
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a")
    examples = golden(path)
    found = quantizer.fit(examples.batches, AutoCalibrationConfig.minmax())
    config = AutoQuantizationConfig.avx512_vnni(is_static=True, per_channel=False)
    quantizer.quantize(
        config,
        tmp_path / "b",
        calibration_tensors_range=found,
        validate=examples,
        budgets=Budgets(max_abs_diff=1.0),
        on_fail="recover",
    )
    written = ORTConfig.from_pretrained(tmp_path / "b").quantization
    assert "product_1" in written["nodes_to_exclude"]


def test_sixteen_bits_are_held_to_budgets_too(tmp_path: Path) -> None:
    path = classifier(tmp_path / "a")
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a")
    config = HalfPrecisionConfig(dtype="bfloat16")
    with pytest.raises(EquivalenceError):
        quantizer.quantize(
            config, tmp_path / "b", validate=golden(path), budgets=Budgets(max_abs_diff=1e-6)
        )
    assert not (tmp_path / "b").exists()
    budgets = Budgets(max_abs_diff=0.1, max_metric_drop=0.0)
    quantizer.quantize(config, tmp_path / "b", validate=golden(path), budgets=budgets)
    assert (tmp_path / "b" / "equivalence.json").exists()


def test_nodes_that_cannot_be_quantized_alone_are_left_out(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.standard_normal((8, 8), dtype=np.float32),
        "zero": np.float32(0).reshape(()),
        "lowest": np.float32(-np.inf).reshape(()),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], name="product"),
        helper.make_node("Where", ["keep", "zero", "lowest"], ["mask"], name="mask"),
        helper.make_node("Add", ["m", "mask"], ["scores"], name="add"),
        helper.make_node("Softmax", ["scores"], ["y"], name="softmax"),
    ]
    inputs = {"x": (TensorProto.FLOAT, ["n", 8]), "keep": (TensorProto.BOOL, ["n", 8])}
    saved(tmp_path / "a", nodes, inputs, {"y": TensorProto.FLOAT}, weights)
    keep = np.ones((3, 8), bool)
    keep[:, 5:] = False
    batch = {"x": rng.standard_normal((3, 8), dtype=np.float32), "keep": keep}
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a")
    ranges = quantizer.fit([batch], AutoCalibrationConfig.minmax())
    config = AutoQuantizationConfig.avx512_vnni(is_static=True)
    found = quantizer.sensitivity(config, [batch], ranges)
    assert "product" in {each.node for each in found}
    assert "mask" not in {each.node for each in found}


@pytest.mark.parametrize("seed", range(6))
def test_nodes_are_ranked_on_batches_that_are_evenly_spaced(seed: int) -> None:
    dice = np.random.default_rng(seed)
    rows = dice.integers(1, 9, size=40)
    batches = [{"value": np.full((count, 2), i)} for i, count in enumerate(rows)]
    for examples in (1, 7, 50, int(rows.sum()), 1000):
        found = sensitivity.evenly(batches, examples)
        places = [int(batch["value"][0, 0]) for batch in found]
        assert len(batches) == len(found) or sum(len(b["value"]) for b in found) >= examples
        gaps = np.diff([*places, len(batches)])
        assert places[0] == 0
        assert gaps.max() - gaps.min() <= 1
        if examples >= rows.sum():
            assert len(found) == len(batches)


def test_the_gate_ranks_nodes_on_some_examples_and_judges_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sensitive(tmp_path / "a")
    every = golden(path)
    seen: list[int] = []
    measured = rewrites.measure

    def noting(before: Path, variants: Any, batches: Any) -> Any:
        seen.append(sum(len(next(iter(batch.values()))) for batch in batches))
        return measured(before, variants, batches)

    monkeypatch.setattr(rewrites, "measure", noting)
    monkeypatch.setattr(publication, "evenly", functools.partial(sensitivity.evenly, examples=1))
    with pytest.raises(EquivalenceError, match="most sensitive: product_1") as caught:
        ORTQuantizer.from_pretrained(tmp_path / "a").quantize(
            dynamic(),
            tmp_path / "b",
            validate=every,
            budgets=Budgets(max_abs_diff=1e-9),
            on_fail="recover",
        )
    report: Any = caught.value.report  # type: ignore[attr-defined]
    assert report.examples == every.examples
    assert seen == [len(next(iter(every.batches[0].values())))] != [every.examples]

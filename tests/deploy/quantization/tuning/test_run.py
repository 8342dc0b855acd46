"""The training run: which weights it gives, and that they follow from its seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ortrain.deploy import GoldenSet
from ortrain.deploy.equivalence.sessions import Runnable
from ortrain.deploy.model_folder import ModelFolder
from ortrain.deploy.quantization import (
    AutoCalibrationConfig,
    AutoQuantizationConfig,
    FineTuning,
    ORTQuantizer,
    QuantizationConfig,
)
from ortrain.deploy.quantization.rewrites import Rewrites
from ortrain.deploy.quantization.tuning.rows import Rows
from ortrain.deploy.quantization.tuning.run import FineTuned, fine_tune
from tests.breadth import crossed
from tests.deploy import exported
from tests.deploy.quantization.models import classifier, ids

DYNAMIC = AutoQuantizationConfig.avx2(is_static=False)
JUDGING = GoldenSet([ids(2, 6, 99)])


def tuned(
    folder: Path, settings: FineTuning, config: QuantizationConfig = DYNAMIC, count: int = 5
) -> FineTuned:
    batches = [ids(8, 6, seed) for seed in range(count)]
    rows = Rows.of(batches, JUDGING, settings)
    return fine_tune(ModelFolder.open(folder), config, None, rows, settings)


def test_a_seed_decides_the_weights(tmp_path: Path) -> None:
    classifier(tmp_path / "a")
    found = {
        name: tuned(tmp_path / "a", FineTuning(steps=4, learning_rate=1e-2, seed=seed))
        for name, seed in (("first", 0), ("again", 0), ("other", 1))
    }
    first, again, other = found.values()
    assert first.loss_after == again.loss_after
    for name, weight in first.weights.items():
        assert np.array_equal(weight, again.weights[name]), name
    assert any((first.weights[name] != other.weights[name]).any() for name in first.weights)


def test_each_step_is_told_and_the_original_is_asked_once_for_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    answer = Runnable.answer
    monkeypatch.setattr(
        Runnable,
        "answer",
        lambda self, batch, name: asked.append(name) or answer(self, batch, name),
    )
    classifier(tmp_path / "a")
    settings = FineTuning(steps=5, batch_size=8)
    rows = Rows.of([ids(8, 6, seed) for seed in range(2)], JUDGING, settings)
    told: list[tuple[int, float, int]] = []
    source = ModelFolder.open(tmp_path / "a")
    fine_tune(source, DYNAMIC, None, rows, settings, lambda *step: told.append(step))
    assert [(number, rows) for number, _, rows in told] == [(n, 8) for n in range(1, 6)]
    assert all(0 < loss < 1 for _, loss, _ in told)
    assert sorted(asked) == ["batch 0", "batch 1"]


def test_weights_that_stay_floating_point_are_not_trained(tmp_path: Path) -> None:
    classifier(tmp_path / "a")
    config = AutoQuantizationConfig.avx2(is_static=False, nodes_to_exclude=["product_0"])
    found = tuned(tmp_path / "a", FineTuning(steps=1), config)
    assert set(found.weights) == {"table", "w1", "head", "b0", "b1", "head_bias"}


def test_the_loss_falls_and_new_weights_are_what_is_quantized(tmp_path: Path) -> None:
    path = classifier(tmp_path / "a")
    config = AutoQuantizationConfig.avx2(is_static=False, per_channel=False, reduce_range=True)
    found = tuned(tmp_path / "a", FineTuning(steps=40, learning_rate=1e-3), config, count=10)
    assert 0 < found.loss_after < 0.9 * found.loss_before
    source = ModelFolder.open(path)
    rewrites = Rewrites(source, None)
    before, after = (rewrites.model("model.onnx", config, w) for w in (None, found.weights))
    names = [name for name in before.graph.initializers if name.endswith("_quantized")]
    assert names == [name for name in after.graph.initializers if name.endswith("_quantized")]
    pairs = [
        [model.graph.initializers[name].const_value.numpy() for model in (before, after)]  # type: ignore[union-attr]
        for name in names
    ]
    assert all((one != other).any() for one, other in pairs)


def test_a_loss_that_is_no_number_ends_the_training(tmp_path: Path) -> None:
    classifier(tmp_path / "a")
    found = tuned(tmp_path / "a", FineTuning(steps=9, learning_rate=1e30))
    assert found.steps < 9
    assert found.to_dict()["loss_after"] is None


def words(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    mask = np.ones((4, 7), np.int64)
    return {"input_ids": rng.integers(5, exported.WORDS, (4, 7)), "attention_mask": mask}


@pytest.mark.parametrize(
    ("name", "is_static"), crossed(["classes", "features"], [False, True], one_in=2)
)
def test_an_exported_transformer_is_trained_through_its_attention(
    name: str, is_static: bool
) -> None:
    folder = exported.folder(name)
    batches = [words(seed) for seed in range(3)]
    config = AutoQuantizationConfig.avx2(is_static, per_channel=False, reduce_range=True)
    ranges = None
    if is_static:
        quantizer = ORTQuantizer.from_pretrained(folder)
        ranges = quantizer.fit(batches, AutoCalibrationConfig.minmax())
    settings = FineTuning(steps=12, learning_rate=2e-4)
    rows = Rows.of(batches, GoldenSet([words(9)]), settings)
    found = fine_tune(ModelFolder.open(folder), config, ranges, rows, settings)
    assert found.objective == ("divergence" if name == "classes" else "mean square")
    assert found.steps == 12
    assert 0 < found.loss_after < found.loss_before
    # Of each of two layers six products, and three tables; equal biases are one in the file.
    assert sum(weight.ndim == 2 for weight in found.weights.values()) >= 2 * 6 + 3
    assert sum(weight.ndim == 1 for weight in found.weights.values()) >= 10

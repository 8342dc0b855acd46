"""Ranges that are learnt: what the graph rounds by them is what the quantizer makes of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper

from ortrain.autodiff import differentiate
from ortrain.deploy import GoldenSet
from ortrain.deploy.model_folder import ModelFolder, save_model
from ortrain.deploy.quantization import (
    AutoCalibrationConfig,
    AutoQuantizationConfig,
    FineTuning,
    ORTQuantizer,
    QuantizationConfig,
)
from ortrain.deploy.quantization.rewrites import Rewrites
from ortrain.deploy.quantization.tuning.insertion import insert
from ortrain.deploy.quantization.tuning.ranges import LearntRanges
from ortrain.deploy.quantization.tuning.roundings import followed, roundings, trained
from ortrain.deploy.quantization.tuning.rows import Rows
from ortrain.deploy.quantization.tuning.run import fine_tune, named
from ortrain.ondevice.making.onnx_source import from_onnx
from ortrain.program import Program, target_of
from tests.deploy.quantization.models import Arrays, classifier, generator, ids, relative, saved
from tests.deploy.quantization.tuning.test_roundings import DYNAMIC, STATIC, answered, computed
from tests.programs import run

ACTIVATIONS, WEIGHTS = "ortrain.range.activations", "ortrain.range.weights"


def learnt(
    folder: Path, config: QuantizationConfig, ranges: Any = None
) -> tuple[Program, Arrays, LearntRanges]:
    """The program of a folder's only model with ranges as parameters, and all of its tensors."""
    source = ModelFolder.open(folder)
    (file,) = source.files
    model = named(source.load(file))
    places = roundings(named(source.load(file)), config, ranges, file)
    decided = followed(named(source.load(file)), config, ranges, file)
    found, places = LearntRanges.of(model, places, decided, ranges, config.activations_symmetric)
    forward = from_onnx(ir.to_proto(model), trained(model, places))
    insert(forward.training, places, found)
    return forward.training, forward.tensors | found.tensors(), found


def calibrated(folder: Path, percentile: float | None = None) -> dict[str, tuple[float, float]]:
    batches = [ids(4, 6, seed) for seed in range(4)]
    config = AutoCalibrationConfig
    method = config.percentiles(percentile=percentile) if percentile else config.minmax()
    return ORTQuantizer.from_pretrained(folder).fit(batches, method)


@pytest.mark.parametrize(
    "name", [*(f"static {n}" for n in STATIC), *(f"dynamic {n}" for n in DYNAMIC)]
)
def test_what_the_graph_rounds_by_is_what_the_quantizer_makes_of_it(
    name: str, tmp_path: Path
) -> None:
    classifier(tmp_path / "a")
    kind, _, name = name.partition(" ")
    config = (STATIC if kind == "static" else DYNAMIC)[name]
    ranges = calibrated(tmp_path / "a") if kind == "static" else None
    nodes = ("embedding", "product_0", "product_1", "classes")
    for node in nodes:
        alone = dataclasses.replace(config, nodes_to_quantize=[node])
        own = {**(ranges or {})}
        if kind == "static":
            expect_alike(tmp_path, alone, own)
        elif name != "asymmetric" or node == "embedding":
            expect_alike(tmp_path, alone, None)


def expect_alike(tmp_path: Path, config: QuantizationConfig, ranges: Any) -> None:
    """Holds a graph of other ranges to the quantized model of them."""
    program, tensors, found = learnt(tmp_path / "a", config, ranges)
    if not found.tensors():
        return
    rng = generator(5)
    for name in found.tensors():
        tensors[name] = rng.uniform(-0.3, 0.1, tensors[name].size).astype(np.float32)
    weights = {n: array for n, array in tensors.items() if not n.startswith("ortrain.")}
    source = ModelFolder.open(tmp_path / "a")
    rewritten = Rewrites(source, ranges).model(
        "model.onnx", config, found.cut(weights, tensors), found.ranges(tensors)
    )
    save_model(rewritten, tmp_path / "quantized.onnx")
    save_model(Rewrites(source, ranges).model("model.onnx", config), tmp_path / "before.onnx")
    feeds = ids(8, 6)
    (wanted,) = answered(tmp_path / "quantized.onnx", feeds)
    (before,) = answered(tmp_path / "before.onnx", feeds)
    (got,) = computed(program, {**tensors, **feeds}, tmp_path / "rounded.onnx")
    apart = relative(before, wanted)
    assert apart > 1e-4, "the ranges change nothing, which tests nothing"
    # The last bit of a scale moves a number between two integers to the other one, seldom.
    assert np.count_nonzero(np.abs(wanted - got) > 1e-5) <= 1
    assert relative(wanted, got) < 0.05 * apart


def test_ranges_begin_as_they_were_calibrated_and_weights_at_their_least_error(
    tmp_path: Path,
) -> None:
    classifier(tmp_path / "a")
    ranges = calibrated(tmp_path / "a")
    _, tensors, found = learnt(tmp_path / "a", STATIC["tensors"], ranges)
    assert not tensors[ACTIVATIONS].any()
    assert found.activations
    for name, (low, high) in found.ranges(tensors).items():
        assert (low, high) == pytest.approx((min(ranges[name][0], 0), max(ranges[name][1], 0)))
    assert set(found.weights) == {"w0", "w1", "head"}
    assert ((tensors[WEIGHTS] > 0) & (tensors[WEIGHTS] < 0.7)).all()


def test_the_range_of_one_value_decides_behind_a_transpose_too(
    tmp_path: Path,
) -> None:
    weights = {"w": generator().standard_normal((5, 3), dtype=np.float32)}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], name="product"),
        helper.make_node("Transpose", ["m"], ["t"], perm=[0, 2, 1], name="turn"),
        helper.make_node("MatMul", ["t", "v"], ["y"], name="second"),
    ]
    weights["v"] = generator(3).standard_normal((4, 2), dtype=np.float32)
    inputs = {"x": (TensorProto.FLOAT, ["n", 4, 5])}
    saved(tmp_path / "a", nodes, inputs, {"y": TensorProto.FLOAT}, weights)
    x = generator(1).standard_normal((2, 4, 5), dtype=np.float32)
    ranges = ORTQuantizer.from_pretrained(tmp_path / "a").fit(
        [{"x": x}], AutoCalibrationConfig.minmax()
    )
    source = ModelFolder.open(tmp_path / "a")
    config = AutoQuantizationConfig.avx512_vnni(is_static=True, per_channel=False)
    decided = followed(named(source.load("model.onnx")), config, ranges, "model.onnx")
    assert decided == {
        ("product", 0): "x", ("turn", 0): "m", ("second", 0): "m", ("y", -1): "y",
    }  # fmt: skip
    _, _, found = learnt(tmp_path / "a", config, ranges)
    assert set(found.activations) == {"x", "m", "y"}


def test_gradients_of_ends_are_those_of_pytorchs_scale_and_zero(tmp_path: Path) -> None:
    weights = {"w": generator().standard_normal((5, 3), dtype=np.float32)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")]
    inputs = {"x": (TensorProto.FLOAT, [64, 5])}
    saved(tmp_path / "a", nodes, inputs, {"y": TensorProto.FLOAT}, weights)
    x = generator(1).standard_normal((64, 5), dtype=np.float32)
    ranges = {"x": (-1.0, 1.25), "y": (-9.0, 9.0)}
    config = AutoQuantizationConfig.avx512_vnni(is_static=True)
    program, tensors, found = learnt(tmp_path / "a", config, ranges)
    place = 2 * [*found.activations].index("x")
    training = differentiate(program, [ACTIVATIONS, WEIGHTS], ["y"])
    dy = generator(2).standard_normal((64, 3), dtype=np.float32)
    known = {"x", "w", *tensors}
    (seed,) = [v.name for v in training.graph.inputs if v.name not in known]
    results = run(training, {**tensors, "x": x, seed: dy})
    named_by = {target_of(v): results[v.name or ""] for v in training.graph.outputs}

    ends = torch.zeros(2, requires_grad=True)
    low, high = -1.0 * ends[0].exp(), 1.25 * ends[1].exp()
    scale = (high - low) / 255
    exact = -low / scale
    zero = exact + (exact.round() - exact).detach()
    shares = torch.tensor(tensors[WEIGHTS], requires_grad=True)
    w = torch.tensor(weights["w"])
    steps = w.abs().amax(0) * (-shares.abs()).exp() * 2 / 254
    fake = torch._fake_quantize_learnable_per_channel_affine
    rounded = fake(w, steps, torch.zeros(3), 1, -127, 127, 1.0)
    a = torch._fake_quantize_learnable_per_tensor_affine(
        torch.tensor(x), scale.reshape(1), zero.reshape(1), 0, 255, 1.0
    )
    y = torch.fake_quantize_per_tensor_affine(a @ rounded, 18 / 255, 128, 0, 255)
    y.backward(torch.tensor(dy))
    assert ends.grad is not None
    assert shares.grad is not None
    np.testing.assert_allclose(
        named_by[ACTIVATIONS][place : place + 2], ends.grad.numpy(), rtol=1e-3
    )
    np.testing.assert_allclose(named_by[WEIGHTS], shares.grad.numpy(), rtol=1e-3, atol=1e-4)


def test_ranges_of_a_few_numbers_cost_less_where_they_are_learnt(tmp_path: Path) -> None:
    classifier(tmp_path / "a")
    ranges = calibrated(tmp_path / "a", percentile=70)
    losses = {}
    for kind in ("learnt", "fixed"):
        settings = FineTuning(steps=60, learning_rate=1e-3, range_learning_rate=3e-2, ranges=kind)
        rows = Rows.of(
            [ids(8, 6, seed) for seed in range(10)], GoldenSet([ids(2, 6, 99)]), settings
        )
        config = STATIC["tensors"]
        found = fine_tune(ModelFolder.open(tmp_path / "a"), config, ranges, rows, settings)
        losses[kind] = found.loss_after
        assert bool(found.ranges) == (kind == "learnt")
    assert 0 < losses["learnt"] < 0.6 * losses["fixed"]

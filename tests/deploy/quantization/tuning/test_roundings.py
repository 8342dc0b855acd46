"""A rounded graph answers as the quantized model does, and its gradients are PyTorch's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from ortrain.autodiff import differentiate
from ortrain.deploy.model_folder import ModelFolder, save_model
from ortrain.deploy.quantization import (
    AutoCalibrationConfig,
    AutoQuantizationConfig,
    ORTQuantizer,
    QuantFormat,
    QuantizationConfig,
)
from ortrain.deploy.quantization.rewrites import Rewrites
from ortrain.deploy.quantization.tuning.insertion import insert
from ortrain.deploy.quantization.tuning.roundings import Roundings, roundings, trained
from ortrain.deploy.quantization.tuning.run import named
from ortrain.ondevice.making.onnx_source import from_onnx
from ortrain.program import Program, target_of
from ortrain.runtime.onnxruntime.lowering import make_standard
from tests.deploy.quantization.models import (
    WIDTH,
    Arrays,
    answers,
    classifier,
    exact,
    generator,
    ids,
    relative,
    saved,
)
from tests.programs import run

DYNAMIC: dict[str, QuantizationConfig] = {
    "channels": AutoQuantizationConfig.avx512_vnni(is_static=False),
    "tensors": AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=False),
    "unsigned": AutoQuantizationConfig.avx2(is_static=False),
    "reduced": AutoQuantizationConfig.avx2(is_static=False, reduce_range=True),
    "asymmetric": AutoQuantizationConfig.avx2(
        is_static=False, use_symmetric_weights=False, per_channel=False
    ),
}
STATIC: dict[str, QuantizationConfig] = {
    "channels": AutoQuantizationConfig.avx512_vnni(is_static=True),
    "tensors": AutoQuantizationConfig.avx512_vnni(is_static=True, per_channel=False),
    "unsigned": AutoQuantizationConfig.avx2(is_static=True, per_channel=False),
    "asymmetric": AutoQuantizationConfig.avx2(
        is_static=True, use_symmetric_weights=False, per_channel=False
    ),
    "reduced": AutoQuantizationConfig.avx2(is_static=True, reduce_range=True),
    "signed": AutoQuantizationConfig.tensorrt(),
}


def rounded(
    folder: Path, config: QuantizationConfig, ranges: Any = None
) -> tuple[Program, Arrays, Roundings]:
    """The program of a folder's only model with its roundings, and the tensors that it is fed."""
    source = ModelFolder.open(folder)
    (file,) = source.files
    model = named(source.load(file))
    found = roundings(named(source.load(file)), config, ranges, file)
    forward = from_onnx(ir.to_proto(model), trained(model, found))
    insert(forward.training, found)
    return forward.training, forward.tensors, found


def computed(program: Program, feeds: Arrays, path: Path) -> list[np.ndarray]:
    standard = program.clone()
    make_standard(standard)
    standard.save(path)
    return answered(path, feeds)


def answered(path: Path, feeds: Arrays) -> list[np.ndarray]:
    """What the nodes of a file give as they stand: fused ones round their ties otherwise."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    found: list[np.ndarray] = session.run(None, {name: feeds[name] for name in names})
    return found


def expect_alike(
    folder: Path,
    config: QuantizationConfig,
    feeds: Arrays,
    tmp_path: Path,
    ranges: Any = None,
    within: float = 1e-3,
) -> Roundings:
    """Holds a rounded graph to the quantized model, to a share of what quantization changes."""
    config = exact(config)  # `answered` takes its nodes as they stand
    program, tensors, found = rounded(folder, config, ranges)
    source = ModelFolder.open(folder)
    (file,) = source.files
    save_model(Rewrites(source, ranges).model(file, config), tmp_path / "quantized.onnx")
    (before,) = answers(folder / file, feeds)
    (wanted,) = answered(tmp_path / "quantized.onnx", feeds)
    (got,) = computed(program, {**tensors, **feeds}, tmp_path / "rounded.onnx")
    apart = relative(before, wanted)
    assert apart > 1e-4, "quantization changes nothing, which tests nothing"
    assert relative(wanted, got) < within * apart
    return found


@pytest.mark.parametrize("name", DYNAMIC)
def test_a_graph_is_rounded_as_dynamic_quantization_does_it(name: str, tmp_path: Path) -> None:
    classifier(tmp_path / "a")
    found = expect_alike(tmp_path / "a", DYNAMIC[name], ids(8, 6), tmp_path)
    assert set(found.rows) == {"embedding"}
    # What is read in integers already is not rounded again.
    assert {place for place in found.inputs if place[1] == 0} == {("product_1", 0), ("classes", 0)}
    assert {place for place in found.inputs if place[1] == 1} == {
        ("product_0", 1),
        ("product_1", 1),
        ("classes", 1),
    }


@pytest.mark.parametrize("name", STATIC)
def test_a_graph_is_rounded_as_static_quantization_does_it(name: str, tmp_path: Path) -> None:
    classifier(tmp_path / "a")
    batches = [ids(4, 6, seed) for seed in range(4)]
    ranges = ORTQuantizer.from_pretrained(tmp_path / "a").fit(
        batches, AutoCalibrationConfig.minmax()
    )
    for node in ("embedding", "product_0", "product_1", "classes"):
        alone = dataclasses.replace(STATIC[name], nodes_to_quantize=[node])
        expect_alike(tmp_path / "a", alone, ids(8, 6), tmp_path, ranges)
    # Sums in another order differ in their last bit, which moves a number between two integers to
    # the other one; that is one step here and there. A wrong range is half of all that changes.
    found = expect_alike(tmp_path / "a", STATIC[name], ids(8, 6), tmp_path, ranges, within=0.2)
    assert "logits" in found.outputs
    assert found.inputs["classes", 0].fixed is not None


def test_static_quantized_operators_are_rounded_as_their_pairs(tmp_path: Path) -> None:
    classifier(tmp_path / "a")
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a")
    ranges = quantizer.fit([ids()], AutoCalibrationConfig.minmax())
    pairs = AutoQuantizationConfig.avx512_vnni(is_static=True)
    operators = QuantizationConfig(
        is_static=True, format=QuantFormat.QOperator, operators_to_quantize=["MatMul", "Gemm"]
    )
    assert (
        rounded(tmp_path / "a", operators, ranges)[2].inputs.keys()
        <= rounded(tmp_path / "a", pairs, ranges)[2].inputs.keys()
    )


def test_a_convolution_is_rounded_along_its_output_channels(tmp_path: Path) -> None:
    rng = generator()
    weights = {
        "kernel": rng.standard_normal((6, 3, 3, 3), dtype=np.float32),
        "bias": rng.standard_normal(6, dtype=np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "kernel", "bias"], ["y"], name="conv", pads=[1, 1, 1, 1])
    ]
    inputs = {"x": (TensorProto.FLOAT, ["n", 3, 5, 5])}
    saved(tmp_path / "a", nodes, inputs, {"y": TensorProto.FLOAT}, weights)
    feeds = {"x": rng.standard_normal((2, 3, 5, 5), dtype=np.float32)}
    config = AutoQuantizationConfig.avx2(is_static=False, per_channel=False)
    expect_alike(tmp_path / "a", config, feeds, tmp_path)
    ranges = ORTQuantizer.from_pretrained(tmp_path / "a").fit(
        [feeds], AutoCalibrationConfig.minmax()
    )
    config = AutoQuantizationConfig.avx512_vnni(is_static=True)
    found = expect_alike(tmp_path / "a", config, feeds, tmp_path, ranges)
    assert found.inputs["conv", 1].axis == 0


def tied(folder: Path) -> Path:
    """A table of words that is the output layer too."""
    rng = generator()
    weights = {"table": rng.standard_normal((40, WIDTH), dtype=np.float32)}
    weights["w"] = (rng.standard_normal((WIDTH, WIDTH)) / 6).astype(np.float32)
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["h"], name="embedding"),
        helper.make_node("MatMul", ["h", "w"], ["m"], name="product"),
        helper.make_node("Tanh", ["m"], ["t"], name="tanh"),
        helper.make_node("Transpose", ["table"], ["columns"], perm=[1, 0], name="transposed"),
        helper.make_node("MatMul", ["t", "columns"], ["logits"], name="words"),
    ]
    inputs = {"input_ids": (TensorProto.INT64, ["batch", "sequence"])}
    return saved(folder, nodes, inputs, {"logits": TensorProto.FLOAT}, weights)


@pytest.mark.parametrize("per_channel", [True, False])
def test_a_table_that_is_the_output_layer_too_stays_one(per_channel: bool, tmp_path: Path) -> None:
    tied(tmp_path / "a")
    config = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=per_channel)
    feeds = {"input_ids": generator(1).integers(0, 40, (4, 5))}
    expect_alike(tmp_path / "a", config, feeds, tmp_path)
    _, tensors, _ = rounded(tmp_path / "a", config)
    assert set(tensors) == {"table", "w"}


def test_what_is_quantized_is_trained_and_biases_beside_it(tmp_path: Path) -> None:
    classifier(tmp_path / "a")
    model = named(ModelFolder.open(tmp_path / "a").load("model.onnx"))
    config = AutoQuantizationConfig.avx2(is_static=False, nodes_to_exclude=["product_0"])
    found = roundings(
        named(ModelFolder.open(tmp_path / "a").load("model.onnx")), config, None, "model.onnx"
    )
    assert set(trained(model, found)) == {"table", "w1", "head", "b0", "b1", "head_bias"}


def test_gradients_are_those_of_the_same_roundings_in_pytorch(tmp_path: Path) -> None:
    rng = generator()
    weight = rng.standard_normal((5, 3), dtype=np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")]
    inputs = {"x": (TensorProto.FLOAT, [4, 5])}
    saved(tmp_path / "a", nodes, inputs, {"y": TensorProto.FLOAT}, {"w": weight})
    x = rng.standard_normal((4, 5), dtype=np.float32)
    # The calibrated range is too narrow for some of it.
    ranges = {"x": (-1.0, 1.0), "y": (-3.0, 2.0)}
    config = AutoQuantizationConfig.avx512_vnni(is_static=True)
    program, tensors, _ = rounded(tmp_path / "a", config, ranges)
    training = differentiate(program, ["w"], ["y"])
    dy = rng.standard_normal((4, 3), dtype=np.float32)
    (seed,) = [v.name for v in training.graph.inputs if v.name not in ("x", "w")]
    results = run(training, {**tensors, "x": x, seed: dy})
    (gradient,) = [results[v.name or ""] for v in training.graph.outputs if target_of(v) == "w"]

    def fixed(low: float, high: float) -> tuple[float, int]:
        scale = (high - low) / 255
        return scale, round(-low / scale)

    held = torch.tensor(weight, requires_grad=True)
    scales = held.detach().abs().amax(0) * 2 / 254
    zeros = torch.zeros(3, dtype=torch.int32)
    w = torch.fake_quantize_per_channel_affine(held, scales, zeros, 1, -127, 127)
    a = torch.fake_quantize_per_tensor_affine(torch.tensor(x), *fixed(*ranges["x"]), 0, 255)
    y = torch.fake_quantize_per_tensor_affine(a @ w, *fixed(*ranges["y"]), 0, 255)
    y.backward(torch.tensor(dy))
    np.testing.assert_allclose(results["y"], y.detach().numpy(), atol=1e-5)
    assert held.grad is not None
    np.testing.assert_allclose(gradient, held.grad.numpy(), rtol=1e-4, atol=1e-5)
    outside = (a @ w < ranges["y"][0]) | (a @ w > ranges["y"][1])
    assert outside.any(), "nothing is out of range, which tests nothing"

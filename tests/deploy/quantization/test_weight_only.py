"""Weights in few bits: as exact as the bits allow, shared weights once, sub-graphs too."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from ortrain.deploy.quantization import ORTQuantizer, WeightOnlyConfig
from ortrain.errors import InputError
from tests.deploy.quantization.models import (
    WIDTH,
    answers,
    checksums,
    classifier,
    generator,
    ids,
    operators,
    relative,
    saved,
)
from tests.deploy.quantization.test_dynamic import branches

# By bits: the largest relative error of answers.
ERRORS = {4: 0.2, 8: 0.02}


def quantized(source: Path, target: Path, config: WeightOnlyConfig) -> Path:
    ORTQuantizer.from_pretrained(source).quantize(config, target)
    path = target / "model_quantized.onnx"
    before, after = (onnx.load(each).graph.output for each in (source / "model.onnx", path))
    assert [value.name for value in after] == [value.name for value in before]
    return path


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_product_and_the_embedding_are_in_few_bits(
    tmp_path: Path, bits: int, symmetric: bool
) -> None:
    before = classifier(tmp_path / "a")
    sums = checksums(tmp_path / "a")
    config = WeightOnlyConfig(bits=bits, block_size=16, symmetric=symmetric)
    after = quantized(tmp_path / "a", tmp_path / "b", config)
    counts = operators(after)
    assert counts["MatMulNBits"] == 3
    assert counts["GatherBlockQuantized"] == 1
    assert not {"MatMul", "Gemm", "Gather"} & counts.keys()
    error = relative(answers(before, ids())[0], answers(after, ids())[0])
    assert 0 < error < ERRORS[bits]
    assert checksums(tmp_path / "a") == sums


def test_each_number_is_the_one_of_its_block_to_half_a_step(tmp_path: Path) -> None:
    rng = generator()
    weight = rng.standard_normal((64, 5), dtype=np.float32)
    inputs = {"x": (TensorProto.FLOAT, ["n", 64])}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")]
    saved(tmp_path / "a", nodes, inputs, {"y": TensorProto.FLOAT}, {"w": weight})
    for bits in (4, 8):
        config = WeightOnlyConfig(bits=bits, block_size=32, accuracy_level=None)
        after = quantized(tmp_path / "a", tmp_path / f"b{bits}", config)
        # Each row of the identity reads one row of the weight.
        found = answers(after, {"x": np.eye(64, dtype=np.float32)})[0]
        blocks = weight.reshape(2, 32, 5)
        span = np.maximum(blocks.max(1), 0) - np.minimum(blocks.min(1), 0)
        step = span / (2**bits - 1)
        apart = np.abs(found - weight).reshape(2, 32, 5).max(1)
        assert (apart <= step * 0.75).all()  # half a step, and the zero's own rounding


def test_sizes_that_blocks_do_not_divide_are_right(tmp_path: Path) -> None:
    rng = generator()
    weight = rng.standard_normal((50, 7), dtype=np.float32)
    inputs = {"x": (TensorProto.FLOAT, ["n", 3, 50])}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")]
    before = saved(tmp_path / "a", nodes, inputs, {"y": TensorProto.FLOAT}, {"w": weight})
    after = quantized(tmp_path / "a", tmp_path / "b", WeightOnlyConfig(bits=8))
    feeds = {"x": rng.standard_normal((2, 3, 50), dtype=np.float32)}
    assert relative(answers(before, feeds)[0], answers(after, feeds)[0]) < ERRORS[8]


def test_a_weight_of_two_products_is_stored_once(tmp_path: Path) -> None:
    rng = generator()
    weight = rng.standard_normal((WIDTH, WIDTH), dtype=np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("MatMul", ["h", "w"], ["y"]),
    ]
    inputs = {"x": (TensorProto.FLOAT, ["n", WIDTH])}
    before = saved(tmp_path / "a", nodes, inputs, {"y": TensorProto.FLOAT}, {"w": weight})
    after = quantized(tmp_path / "a", tmp_path / "b", WeightOnlyConfig(bits=8))
    names = sorted(i.name for i in onnx.load(after).graph.initializer)
    assert names == ["w_Q8", "w_scales", "w_zero_points"]
    feeds = {"x": rng.standard_normal((2, WIDTH), dtype=np.float32)}
    assert relative(answers(before, feeds)[0], answers(after, feeds)[0]) < ERRORS[8]


@pytest.mark.parametrize("outside", [True, False])
def test_products_in_branches_are_in_few_bits(tmp_path: Path, outside: bool) -> None:
    before = branches(tmp_path / "a", outside=outside)
    after = quantized(tmp_path / "a", tmp_path / "b", WeightOnlyConfig(bits=8))
    assert operators(after)["MatMulNBits"] == 3
    for switch in (True, False):
        feeds: dict[str, Any] = {
            "x": generator(3).standard_normal((3, WIDTH), dtype=np.float32),
            "switch": np.array(switch),
        }
        assert relative(answers(before, feeds)[0], answers(after, feeds)[0]) < ERRORS[8]


def test_an_excluded_node_stays(tmp_path: Path) -> None:
    classifier(tmp_path / "a")
    config = WeightOnlyConfig(nodes_to_exclude=["classes", "embedding"], block_size=16)
    counts = operators(quantized(tmp_path / "a", tmp_path / "b", config))
    assert (counts["Gemm"], counts["Gather"], counts["MatMulNBits"]) == (1, 1, 2)


def test_products_alone_can_be_chosen(tmp_path: Path) -> None:
    classifier(tmp_path / "a")
    config = WeightOnlyConfig(operators_to_quantize=["MatMul"], block_size=16)
    counts = operators(quantized(tmp_path / "a", tmp_path / "b", config))
    assert (counts["Gather"], counts["MatMulNBits"]) == (1, 3)


@pytest.mark.parametrize(("level", "wanted"), [(4, [4, 4, 4]), (1, [1, 1, 1]), (None, [])])
def test_the_level_of_accuracy_stands_in_the_nodes(
    tmp_path: Path, level: int | None, wanted: list[int]
) -> None:
    before = classifier(tmp_path / "a")
    config = WeightOnlyConfig(bits=8, accuracy_level=level, block_size=16)
    after = quantized(tmp_path / "a", tmp_path / "b", config)
    nodes = [n for n in onnx.load(after).graph.node if n.op_type == "MatMulNBits"]
    assert [a.i for n in nodes for a in n.attribute if a.name == "accuracy_level"] == wanted
    assert relative(answers(before, ids())[0], answers(after, ids())[0]) < 0.02


def test_four_bits_are_an_eighth_of_the_size(tmp_path: Path) -> None:
    rng = generator()
    weights = {"w": rng.standard_normal((512, 512), dtype=np.float32)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    inputs = {"x": (TensorProto.FLOAT, ["n", 512])}
    before = saved(tmp_path / "a", nodes, inputs, {"y": TensorProto.FLOAT}, weights)
    after = quantized(tmp_path / "a", tmp_path / "b", WeightOnlyConfig(block_size=128))
    assert after.stat().st_size < 0.14 * before.stat().st_size


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bits": 3}, "bits=3"),
        ({"block_size": 48}, "block_size=48"),
        ({"accuracy_level": 7}, "accuracy_level=7"),
        ({"operators_to_quantize": ["Conv"]}, "Conv"),
    ],
)
def test_a_wrong_configuration_is_an_error(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightOnlyConfig(**given)


def test_nothing_to_quantize_is_an_error(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    saved(tmp_path / "a", nodes, {"x": (TensorProto.FLOAT, ["n"])}, {"y": TensorProto.FLOAT}, {})
    with pytest.raises(InputError, match=r"nothing of .* would be quantized"):
        quantized(tmp_path / "a", tmp_path / "b", WeightOnlyConfig())


def test_no_library_begins_to_log(tmp_path: Path) -> None:
    classifier(tmp_path / "a")
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    quantized(tmp_path / "a", tmp_path / "b", WeightOnlyConfig(block_size=16))
    assert (root.level, list(root.handlers)) == before
    code = (
        "import logging, sys; from ortrain.deploy.quantization import ORTQuantizer; "
        "sys.exit(logging.getLogger().level != logging.WARNING or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_table_that_is_also_the_transposed_output_layer_is_stored_once(
    tmp_path: Path, bits: int, symmetric: bool
) -> None:
    rng = generator()
    table = rng.standard_normal((64, WIDTH), dtype=np.float32)
    nodes = [
        helper.make_node("Gather", ["w", "i"], ["rows"], name="gather"),
        helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["rows", "t"], ["y"], name="output"),
    ]
    inputs = {"i": (TensorProto.INT64, ["n", "s"])}
    outputs = {"rows": TensorProto.FLOAT, "y": TensorProto.FLOAT}
    before = saved(tmp_path / "a", nodes, inputs, outputs, {"w": table})
    config = WeightOnlyConfig(bits=bits, block_size=16, symmetric=symmetric)
    after = quantized(tmp_path / "a", tmp_path / "b", config)
    large = [i for i in onnx.load(after).graph.initializer if np.prod(i.dims) >= 64 * WIDTH // 2]
    assert len(large) == 1
    feeds = {"i": np.arange(64).reshape(8, 8)}
    for old, new in zip(answers(before, feeds), answers(after, feeds), strict=True):
        assert relative(old, new) < ERRORS[bits]

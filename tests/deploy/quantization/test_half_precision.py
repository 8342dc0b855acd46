"""Floating point of 16 bits: half the size, and an error that the bits explain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from ortrain.deploy.quantization import HalfPrecisionConfig, ORTQuantizer
from ortrain.errors import InputError
from tests.deploy.quantization.models import (
    answers,
    checksums,
    classifier,
    generator,
    ids,
    operators,
    relative,
    saved,
)

ERRORS = {"float16": 1e-3, "bfloat16": 8e-3}


def converted(source: Path, target: Path, **given: Any) -> Path:
    ORTQuantizer.from_pretrained(source).quantize(HalfPrecisionConfig(**given), target, "half")
    return target / "model_half.onnx"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_of_half_the_size_answer_nearly_the_same(tmp_path: Path, dtype: str) -> None:
    before = classifier(tmp_path / "a", layers=8)
    sums = checksums(tmp_path / "a")
    after = converted(tmp_path / "a", tmp_path / "b", dtype=dtype)
    kinds = {i.data_type for i in onnx.load(after).graph.initializer if np.prod(i.dims) >= 64}
    assert kinds == {getattr(TensorProto, dtype.upper())}
    assert after.stat().st_size < 0.65 * before.stat().st_size
    error = relative(answers(before, ids())[0], answers(after, ids())[0])
    assert 0 < error < ERRORS[dtype]
    assert checksums(tmp_path / "a") == sums


@pytest.mark.parametrize("keep_io_types", [True, False])
def test_computing_in_float16_leaves_no_weight_in_float32(
    tmp_path: Path, keep_io_types: bool
) -> None:
    before = classifier(tmp_path / "a")
    after = converted(tmp_path / "a", tmp_path / "b", compute=True, keep_io_types=keep_io_types)
    model = onnx.load(after)
    kinds = {i.data_type for i in model.graph.initializer if np.prod(i.dims) >= 4}
    assert kinds == {TensorProto.FLOAT16}
    wanted = TensorProto.FLOAT if keep_io_types else TensorProto.FLOAT16
    assert model.graph.output[0].type.tensor_type.elem_type == wanted
    found = answers(after, ids())[0].astype(np.float32)
    assert 0 < relative(answers(before, ids())[0], found) < 5e-3


def test_an_excluded_node_keeps_its_weight(tmp_path: Path) -> None:
    classifier(tmp_path / "a")
    after = converted(tmp_path / "a", tmp_path / "b", nodes_to_exclude=["classes"])
    kinds = {i.name: i.data_type for i in onnx.load(after).graph.initializer}
    assert kinds["head"] == TensorProto.FLOAT
    assert operators(after)["Cast"] == 3


@pytest.mark.parametrize("how", ["nodes_to_exclude", "operators_to_exclude"])
def test_what_is_excluded_computes_in_float32(tmp_path: Path, how: str) -> None:
    before = classifier(tmp_path / "a")
    given = {"nodes_to_exclude": ["classes"], "operators_to_exclude": ["MatMul", "Gemm"]}[how]
    after = converted(tmp_path / "a", tmp_path / "b", compute=True, **{how: given})
    kinds = {i.name: i.data_type for i in onnx.load(after).graph.initializer}
    assert kinds["head"] == TensorProto.FLOAT
    assert TensorProto.FLOAT16 in kinds.values()
    assert relative(answers(before, ids())[0], answers(after, ids())[0]) < 5e-3


def test_outputs_are_float16_where_float32_made_them(tmp_path: Path) -> None:
    # A sum of squares stays float32, being beyond float16 for ordinary numbers.
    nodes = [helper.make_node("ReduceSumSquare", ["x"], ["y"], keepdims=1)]
    saved(tmp_path / "a", nodes, {"x": (TensorProto.FLOAT, ["n", 8])}, {"y": TensorProto.FLOAT}, {})
    after = converted(tmp_path / "a", tmp_path / "b", compute=True, keep_io_types=False)
    found = answers(after, {"x": np.full((2, 8), 3, np.float16)})[0]
    assert found.dtype == np.float16
    assert found.reshape(-1).tolist() == [144.0]


def masked(folder: Path, mask: np.ndarray) -> Path:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Add", ["p", "mask"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["y"]),
    ]
    inputs = {"x": (TensorProto.FLOAT, [8, 8])}
    weights = {"mask": mask, "w": generator().standard_normal((8, 8), dtype=np.float32)}
    return saved(folder, nodes, inputs, {"y": TensorProto.FLOAT}, weights)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scores_do_not_count_in_a_row_that_is_masked_as_a_whole(tmp_path: Path, dtype: str) -> None:
    mask = np.full((8, 8), np.finfo(np.float32).min, np.float32)
    before = masked(tmp_path / "a", mask)
    after = converted(tmp_path / "a", tmp_path / "b", dtype=dtype)
    feeds = {"x": 9 * generator(1).standard_normal((8, 8), dtype=np.float32)}
    assert np.array_equal(answers(before, feeds)[0], answers(after, feeds)[0])
    assert (answers(after, feeds)[0] == np.float32(0.125)).all()


def test_a_weight_that_does_not_fit_is_named(tmp_path: Path) -> None:
    rng = generator()
    weights = {"w": rng.standard_normal((16, 16), dtype=np.float32) * np.float32(1e6)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")]
    inputs = {"x": (TensorProto.FLOAT, ["n", 16])}
    before = saved(tmp_path / "a", nodes, inputs, {"y": TensorProto.FLOAT}, weights)
    with pytest.raises(InputError, match="beyond the range of float16"):
        converted(tmp_path / "a", tmp_path / "b")
    after = converted(tmp_path / "a", tmp_path / "c", dtype="bfloat16")
    feeds = {"x": rng.standard_normal((2, 16), dtype=np.float32)}
    assert relative(answers(before, feeds)[0], answers(after, feeds)[0]) < 8e-3


def test_masks_of_infinities_stay_masks(tmp_path: Path) -> None:
    mask = np.zeros((8, 8), np.float32)
    mask[:, 4:] = np.finfo(np.float32).min
    masked(tmp_path / "a", mask)
    after = converted(tmp_path / "a", tmp_path / "b")
    found = answers(after, {"x": generator().standard_normal((8, 8), dtype=np.float32)})[0]
    assert np.isfinite(found).all()
    assert (found[:, 4:] == 0).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": "float8"}, "dtype='float8'"),
        ({"dtype": "bfloat16", "compute": True}, "too few kernels"),
    ],
)
def test_a_wrong_configuration_is_an_error(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HalfPrecisionConfig(**given)

"""Passes that choose nodes, in graphs of old and of new exporters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from ortrain.deploy.quantization import (
    AutoQuantizationConfig,
    ExcludeGeLUNodes,
    ExcludeLayerNormNodes,
    ExcludeNodeAfter,
    ExcludeNodeFollowedBy,
    IncludeFullyConnectedNodes,
    ORTQuantizer,
    PreprocessorPass,
    QuantizationPreprocessor,
)
from tests.deploy.quantization.models import classifier, operators, saved

WEIGHTS = {
    "two": np.float32(2),
    "half": np.float32(0.5),
    "one": np.float32(1),
    "epsilon": np.float32(1e-5),
    "root2": np.float32(np.sqrt(2)),
    "scale": np.ones(8, np.float32),
    "shift": np.zeros(8, np.float32),
    "axes": np.array([-1], np.int64),
    "w": np.eye(8, dtype=np.float32),
}


def written_out(folder: Path) -> Path:
    """A layer normalization and a GELU as they were written before there were operators."""
    n = helper.make_node
    nodes = [
        n("MatMul", ["x", "w"], ["p"], name="product"),
        n("ReduceMean", ["p", "axes"], ["mean"], name="mean"),
        n("Sub", ["p", "mean"], ["centred"], name="centre"),
        n("Pow", ["centred", "two"], ["square"], name="square"),
        n("ReduceMean", ["square", "axes"], ["variance"], name="variance"),
        n("Add", ["variance", "epsilon"], ["shifted"], name="epsilon_added"),
        n("Sqrt", ["shifted"], ["deviation"], name="root"),
        n("Div", ["centred", "deviation"], ["normal"], name="divide"),
        n("Mul", ["normal", "scale"], ["scaled"], name="scale_by"),
        n("Add", ["scaled", "shift"], ["layer"], name="shift_by"),
        n("Div", ["layer", "root2"], ["inner"], name="gelu_divide"),
        n("Erf", ["inner"], ["curve"], name="gelu_erf"),
        n("Add", ["curve", "one"], ["lifted"], name="gelu_add"),
        n("Mul", ["layer", "lifted"], ["twice"], name="gelu_multiply"),
        n("Mul", ["twice", "half"], ["g"], name="gelu_half"),
        n("Add", ["g", "p"], ["y"], name="residual"),
    ]
    inputs = {"x": (TensorProto.FLOAT, ["n", 8])}
    return saved(folder, nodes, inputs, {"y": TensorProto.FLOAT}, WEIGHTS)


def operators_of_today(folder: Path) -> Path:
    n = helper.make_node
    nodes = [
        n("MatMul", ["x", "w"], ["p"], name="product"),
        n("LayerNormalization", ["p", "scale", "shift"], ["layer"], name="norm"),
        n("Gelu", ["layer"], ["g"], name="gelu"),
        n("Add", ["g", "p"], ["y"], name="residual"),
    ]
    inputs = {"x": (TensorProto.FLOAT, ["n", 8])}
    return saved(folder, nodes, inputs, {"y": TensorProto.FLOAT}, WEIGHTS)


def collected(path: Path, *passes: PreprocessorPass) -> tuple[set[str], set[str]]:
    preprocessor = QuantizationPreprocessor(path)
    for each in passes:
        preprocessor.register_pass(each)
    return preprocessor.collect()


def test_layer_normalization_is_found_written_out_and_as_an_operator(tmp_path: Path) -> None:
    _, old = collected(written_out(tmp_path / "a"), ExcludeLayerNormNodes())
    assert old == {
        "mean",
        "centre",
        "square",
        "variance",
        "epsilon_added",
        "root",
        "divide",
        "scale_by",
        "shift_by",
    }
    _, new = collected(operators_of_today(tmp_path / "b"), ExcludeLayerNormNodes())
    assert new == {"norm"}


def test_gelu_is_found_written_out_and_as_an_operator(tmp_path: Path) -> None:
    _, old = collected(written_out(tmp_path / "a"), ExcludeGeLUNodes())
    assert old == {"gelu_divide", "gelu_erf", "gelu_add", "gelu_multiply", "gelu_half"}
    _, new = collected(operators_of_today(tmp_path / "b"), ExcludeGeLUNodes())
    assert new == {"gelu"}


def test_nodes_behind_and_before_an_operator_are_excluded(tmp_path: Path) -> None:
    path = operators_of_today(tmp_path / "a")
    assert collected(path, ExcludeNodeAfter("Gelu", "Add")) == (set(), {"residual"})
    assert collected(path, ExcludeNodeAfter("Add", "Gelu")) == (set(), set())
    assert collected(path, ExcludeNodeFollowedBy("MatMul", "Add")) == (set(), {"product"})
    assert collected(path, ExcludeNodeFollowedBy("Gelu", "MatMul")) == (set(), set())


def test_linear_layers_are_included_in_each_of_their_forms(tmp_path: Path) -> None:
    more, less = collected(classifier(tmp_path / "a"), IncludeFullyConnectedNodes())
    assert (more, less) == ({"product_0", "product_1", "classes"}, set())


def test_a_node_that_one_pass_excludes_is_not_included_by_another(tmp_path: Path) -> None:
    more, less = collected(
        operators_of_today(tmp_path / "a"),
        IncludeFullyConnectedNodes(),
        ExcludeNodeFollowedBy("MatMul", "Add"),
    )
    assert (more, less) == (set(), {"product"})


class ExcludeFirst(PreprocessorPass):
    def __call__(self, graph: ir.Graph, model: ir.Model) -> tuple[set[str], set[str]]:
        return set(), {"product_0"}


def test_quantize_takes_what_passes_choose_and_leaves_the_configuration(tmp_path: Path) -> None:
    classifier(tmp_path / "a")
    preprocessor = QuantizationPreprocessor()
    preprocessor.register_pass(IncludeFullyConnectedNodes())
    preprocessor.register_pass(ExcludeFirst())
    config = AutoQuantizationConfig.avx512_vnni(is_static=False)
    before = config.to_dict()
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a")
    quantizer.quantize(config, tmp_path / "b", preprocessor=preprocessor)
    counts = operators(tmp_path / "b" / "model_quantized.onnx")
    assert (counts["MatMul"], counts["MatMulInteger"]) == (1, 2)
    assert "DequantizeLinear" not in counts  # the embedding is no linear layer
    assert config.to_dict() == before


def test_what_is_no_pass_is_an_error() -> None:
    with pytest.raises(TypeError, match="a PreprocessorPass"):
        QuantizationPreprocessor().register_pass(print)  # type: ignore[arg-type]


def test_passes_without_a_model_are_an_error() -> None:
    with pytest.raises(ValueError, match="there is no model"):
        QuantizationPreprocessor().collect()

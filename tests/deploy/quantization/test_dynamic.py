"""Dynamic quantization: every product, the same answers within eight bits, the source untouched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from ortrain.deploy.ort_config import ORTConfig
from ortrain.deploy.quantization import AutoQuantizationConfig, ORTQuantizer, QuantizationConfig
from ortrain.errors import InputError, OrtrainWarning
from tests.deploy.quantization.models import (
    OVERFLOWS,
    WIDTH,
    answers,
    checksums,
    classifier,
    exact,
    generator,
    ids,
    operators,
    relative,
    saved,
)

PRESETS = ("arm64", "avx2", "avx512", "avx512_vnni", "ppc64le", "auto")


NEARLY = 0.04 if OVERFLOWS else 0.02  # a step of seven bits is twice as wide


def dynamic(**more: Any) -> QuantizationConfig:
    return exact(AutoQuantizationConfig.avx512_vnni(is_static=False, **more))


def quantized(source: Path, target: Path, config: QuantizationConfig | None = None) -> Path:
    quantizer = ORTQuantizer.from_pretrained(source)
    quantizer.quantize(config or dynamic(), target)
    path = target / "model_quantized.onnx"
    before, after = (onnx.load(each).graph for each in (source / "model.onnx", path))
    for names in ("input", "output"):
        assert [v.name for v in getattr(after, names)] == [v.name for v in getattr(before, names)]
    return path


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_quantizes_every_product_and_answers_nearly_the_same(
    tmp_path: Path, preset: str, per_channel: bool
) -> None:
    before = classifier(tmp_path / "a")
    config = exact(
        getattr(AutoQuantizationConfig, preset)(is_static=False, per_channel=per_channel)
    )
    after = quantized(tmp_path / "a", tmp_path / "b", config)
    counts = operators(after)
    assert counts["MatMulInteger"] == 3
    assert "MatMul" not in counts
    assert "Gemm" not in counts
    assert relative(answers(before, ids())[0], answers(after, ids())[0]) < 0.03


def test_the_source_stays_as_it_is_to_the_byte(tmp_path: Path) -> None:
    classifier(tmp_path / "a")
    before = checksums(tmp_path / "a")
    quantized(tmp_path / "a", tmp_path / "b")
    assert checksums(tmp_path / "a") == before


def test_nothing_else_is_left_in_the_target(tmp_path: Path) -> None:
    classifier(tmp_path / "a")
    quantized(tmp_path / "a", tmp_path / "b")
    names = {path.name for path in (tmp_path / "b").iterdir()}
    assert names == {"config.json", "model_quantized.onnx", "ort_config.json"}


def test_the_embedding_becomes_integers_too_and_the_file_small(tmp_path: Path) -> None:
    before = classifier(tmp_path / "a", layers=1)
    after = quantized(tmp_path / "a", tmp_path / "b")
    kinds = {i.name: i.data_type for i in onnx.load(after).graph.initializer}
    assert kinds["table_quantized"] == TensorProto.UINT8
    assert "table" not in kinds
    assert after.stat().st_size < before.stat().st_size


def test_what_was_done_stands_in_ort_config(tmp_path: Path) -> None:
    classifier(tmp_path / "a")
    quantized(tmp_path / "a", tmp_path / "b", dynamic(nodes_to_exclude=["product_1"]))
    found = ORTConfig.from_pretrained(tmp_path / "b").quantization
    assert found["weights_dtype"] == "QInt8"
    assert found["nodes_to_exclude"] == ["product_1"]
    again = QuantizationConfig.from_dict(found)
    assert again == dynamic(nodes_to_exclude=["product_1"])


def test_an_excluded_node_stays_and_the_others_do_not(tmp_path: Path) -> None:
    classifier(tmp_path / "a")
    after = quantized(tmp_path / "a", tmp_path / "b", dynamic(nodes_to_exclude=["product_0"]))
    assert operators(after)["MatMul"] == 1
    assert operators(after)["MatMulInteger"] == 2


def test_only_the_nodes_that_are_named_are_quantized(tmp_path: Path) -> None:
    classifier(tmp_path / "a")
    after = quantized(tmp_path / "a", tmp_path / "b", dynamic(nodes_to_quantize=["classes"]))
    counts = operators(after)
    assert counts["MatMulInteger"] == 1
    assert counts["MatMul"] == 2
    assert "DequantizeLinear" not in counts


def test_only_the_operators_that_are_named_are_quantized(tmp_path: Path) -> None:
    classifier(tmp_path / "a")
    after = quantized(tmp_path / "a", tmp_path / "b", dynamic(operators_to_quantize=["Gather"]))
    counts = operators(after)
    assert "MatMulInteger" not in counts
    assert counts["DequantizeLinear"] == 1


def test_a_node_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    classifier(tmp_path / "a")
    with pytest.raises(ValueError, match="nodes_to_exclude has 'produkt'"):
        quantized(tmp_path / "a", tmp_path / "b", dynamic(nodes_to_exclude=["produkt"]))
    assert not (tmp_path / "b").exists()


def test_the_callers_configuration_stays_as_it_is(tmp_path: Path) -> None:
    classifier(tmp_path / "a")
    config = dynamic(nodes_to_exclude=["product_0"])
    before = config.to_dict()
    quantized(tmp_path / "a", tmp_path / "b", config)
    assert config.to_dict() == before


def test_two_configurations_share_no_list_and_no_mapping() -> None:
    one, two = dynamic(), dynamic()
    one.qdq_op_type_per_channel_support_to_axis["MatMul"] = 0
    one.nodes_to_exclude.append("x")
    assert two.qdq_op_type_per_channel_support_to_axis == {"MatMul": 1}
    assert two.nodes_to_exclude == []


def test_a_weight_that_two_products_share_is_stored_once(tmp_path: Path) -> None:
    rng = generator()
    weight = rng.standard_normal((WIDTH, WIDTH), dtype=np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="first"),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "w"], ["y"], name="second"),
    ]
    inputs = {"x": (TensorProto.FLOAT, ["n", WIDTH])}
    before = saved(tmp_path / "a", nodes, inputs, {"y": TensorProto.FLOAT}, {"w": weight})
    after = quantized(tmp_path / "a", tmp_path / "b")
    assert operators(after)["MatMulInteger"] == 2
    large = [i.name for i in onnx.load(after).graph.initializer if len(i.dims) == 2]
    assert large == ["w_quantized"]
    feeds = {"x": rng.standard_normal((3, WIDTH), dtype=np.float32)}
    assert relative(answers(before, feeds)[0], answers(after, feeds)[0]) < NEARLY


@pytest.mark.parametrize("first", ["table", "product"])
def test_a_table_that_is_read_and_multiplied_with_has_its_scales_for_each(
    tmp_path: Path, first: str
) -> None:
    rng = generator()
    # Columns of very different sizes, which one scale for all would not serve.
    table = rng.standard_normal((WIDTH, WIDTH), dtype=np.float32)
    table *= np.logspace(-2, 1, WIDTH, dtype=np.float32)
    gather = helper.make_node("Gather", ["w", "i"], ["rows"], name="gather")
    product = helper.make_node("MatMul", ["x", "w"], ["y"], name="product")
    nodes = [gather, product] if first == "table" else [product, gather]
    inputs = {"i": (TensorProto.INT64, ["n"]), "x": (TensorProto.FLOAT, ["n", WIDTH])}
    outputs = {"rows": TensorProto.FLOAT, "y": TensorProto.FLOAT}
    before = saved(tmp_path / "a", nodes, inputs, outputs, {"w": table})
    after = quantized(tmp_path / "a", tmp_path / "b")
    feeds = {"i": np.arange(5), "x": rng.standard_normal((5, WIDTH), dtype=np.float32)}
    for old, new in zip(answers(before, feeds), answers(after, feeds), strict=True):
        assert relative(old, new) < NEARLY
    assert operators(after)["MatMulInteger"] == 1


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("preset", ["avx2", "avx512_vnni"])
def test_a_table_that_is_also_the_transposed_output_layer_is_stored_once(
    tmp_path: Path, preset: str, per_channel: bool
) -> None:
    rng = generator()
    table = rng.standard_normal((64, WIDTH), dtype=np.float32)
    if per_channel:  # rows of very different sizes
        table *= np.logspace(-2, 1, 64, dtype=np.float32)[:, None]
    nodes = [
        helper.make_node("Gather", ["w", "i"], ["rows"], name="gather"),
        helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["rows", "t"], ["y"], name="output"),
    ]
    inputs = {"i": (TensorProto.INT64, ["n", "s"])}
    outputs = {"rows": TensorProto.FLOAT, "y": TensorProto.FLOAT}
    before = saved(tmp_path / "a", nodes, inputs, outputs, {"w": table})
    config = exact(
        getattr(AutoQuantizationConfig, preset)(is_static=False, per_channel=per_channel)
    )
    after = quantized(tmp_path / "a", tmp_path / "b", config)
    assert operators(after)["MatMulInteger"] == 1
    large = [i.data_type for i in onnx.load(after).graph.initializer if len(i.dims) == 2]
    assert large == [TensorProto.UINT8 if preset == "avx2" else TensorProto.INT8]
    feeds = {"i": np.arange(64).reshape(8, 8)}
    old, new = answers(before, feeds), answers(after, feeds)
    for row in range(8) if per_channel else (slice(None),):
        assert relative(old[0][row], new[0][row]) < NEARLY
    assert relative(old[1], new[1]) < NEARLY


def test_weights_in_constant_nodes_are_quantized(tmp_path: Path) -> None:
    rng = generator()
    weight = rng.standard_normal((WIDTH, WIDTH), dtype=np.float32)
    nodes = [
        helper.make_node("Constant", [], ["w"], value=onnx.numpy_helper.from_array(weight)),
        helper.make_node("Identity", ["w"], ["same"]),
        helper.make_node("MatMul", ["x", "same"], ["y"]),
    ]
    inputs = {"x": (TensorProto.FLOAT, ["n", WIDTH])}
    before = saved(tmp_path / "a", nodes, inputs, {"y": TensorProto.FLOAT}, {})
    after = quantized(tmp_path / "a", tmp_path / "b")
    assert operators(after)["MatMulInteger"] == 1
    feeds = {"x": rng.standard_normal((3, WIDTH), dtype=np.float32)}
    assert relative(answers(before, feeds)[0], answers(after, feeds)[0]) < NEARLY


@pytest.mark.parametrize(
    ("attributes", "shape"),
    [
        ({}, (WIDTH, 8)),
        ({"transB": 1}, (8, WIDTH)),
        ({"transB": 1, "alpha": 0.5}, (8, WIDTH)),
        ({"alpha": 2.0, "beta": 3.0}, (WIDTH, 8)),
    ],
)
def test_gemm_in_each_of_its_forms_becomes_a_quantized_product(
    tmp_path: Path, attributes: dict[str, Any], shape: tuple[int, int]
) -> None:
    rng = generator()
    weights = {
        "w": rng.standard_normal(shape, dtype=np.float32),
        "b": rng.standard_normal(8, dtype=np.float32),
    }
    nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["y"], name="gemm", **attributes)]
    inputs = {"x": (TensorProto.FLOAT, ["n", WIDTH])}
    before = saved(tmp_path / "a", nodes, inputs, {"y": TensorProto.FLOAT}, weights)
    after = quantized(tmp_path / "a", tmp_path / "b")
    assert operators(after)["MatMulInteger"] == 1
    feeds = {"x": rng.standard_normal((3, WIDTH), dtype=np.float32)}
    assert relative(answers(before, feeds)[0], answers(after, feeds)[0]) < NEARLY


def test_a_fused_product_is_quantized_with_the_weight_as_it_is_meant(tmp_path: Path) -> None:
    rng = generator()
    weight = rng.standard_normal((8, WIDTH), dtype=np.float32)
    node = helper.make_node(
        "FusedMatMul", ["x", "w"], ["y"], name="f", domain="com.microsoft", transB=1, alpha=0.25
    )
    inputs = {"x": (TensorProto.FLOAT, ["n", WIDTH])}
    before = saved(tmp_path / "a", [node], inputs, {"y": TensorProto.FLOAT}, {"w": weight})
    after = quantized(tmp_path / "a", tmp_path / "b")
    assert operators(after)["MatMulInteger"] == 1
    feeds = {"x": rng.standard_normal((3, WIDTH), dtype=np.float32)}
    assert relative(answers(before, feeds)[0], answers(after, feeds)[0]) < NEARLY


@pytest.mark.parametrize("preset", ["avx2", "avx512_vnni"])
def test_a_convolution_is_quantized_and_runs(tmp_path: Path, preset: str) -> None:
    rng = generator()
    weights = {
        "w": rng.standard_normal((4, 3, 3, 3), dtype=np.float32),
        "b": rng.standard_normal(4, dtype=np.float32),
    }
    nodes = [helper.make_node("Conv", ["x", "w", "b"], ["y"], name="conv", pads=[1, 1, 1, 1])]
    inputs = {"x": (TensorProto.FLOAT, ["n", 3, 8, 8])}
    before = saved(tmp_path / "a", nodes, inputs, {"y": TensorProto.FLOAT}, weights)
    config = exact(getattr(AutoQuantizationConfig, preset)(is_static=False))
    after = quantized(tmp_path / "a", tmp_path / "b", config)
    assert operators(after)["ConvInteger"] == 1
    feeds = {"x": rng.standard_normal((2, 3, 8, 8), dtype=np.float32)}
    assert relative(answers(before, feeds)[0], answers(after, feeds)[0]) < 0.03


def branches(folder: Path, *, outside: bool) -> Path:
    """An If whose branches multiply with weights of their own, or with one from outside."""
    rng = generator()
    weights = {f"w{i}": rng.standard_normal((WIDTH, WIDTH), dtype=np.float32) for i in range(3)}

    def branch(name: str, weight: str) -> onnx.GraphProto:
        own = [] if outside else [onnx.numpy_helper.from_array(weights[weight], weight)]
        node = helper.make_node("MatMul", ["h", weight], ["out"], name=name)
        value = helper.make_tensor_value_info("out", TensorProto.FLOAT, None)
        return helper.make_graph([node], name, [], [value], own)

    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["h"], name="before"),
        helper.make_node(
            "If",
            ["switch"],
            ["y"],
            name="if",
            then_branch=branch("yes", "w1"),
            else_branch=branch("no", "w2"),
        ),
    ]
    inputs = {"x": (TensorProto.FLOAT, ["n", WIDTH]), "switch": (TensorProto.BOOL, [])}
    kept = weights if outside else {"w0": weights["w0"]}
    return saved(folder, nodes, inputs, {"y": TensorProto.FLOAT}, kept)


@pytest.mark.parametrize("outside", [True, False])
def test_products_in_both_branches_of_an_if_are_quantized(tmp_path: Path, outside: bool) -> None:
    before = branches(tmp_path / "a", outside=outside)
    after = quantized(tmp_path / "a", tmp_path / "b")
    assert operators(after)["MatMulInteger"] == 3
    assert "MatMul" not in operators(after)
    for switch in (True, False):
        feeds = {
            "x": generator(3).standard_normal((3, WIDTH), dtype=np.float32),
            "switch": np.array(switch),
        }
        assert relative(answers(before, feeds)[0], answers(after, feeds)[0]) < NEARLY


def test_a_product_in_the_body_of_a_loop_is_quantized(tmp_path: Path) -> None:
    rng = generator()
    weight = rng.standard_normal((WIDTH, WIDTH), dtype=np.float32) / np.float32(np.sqrt(WIDTH))
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go_on"], ["going_on"]),
            helper.make_node("MatMul", ["state", "w"], ["next"], name="step"),
        ],
        "body",
        [
            helper.make_tensor_value_info("index", TensorProto.INT64, []),
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, ["n", WIDTH]),
        ],
        [
            helper.make_tensor_value_info("going_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, ["n", WIDTH]),
        ],
    )
    nodes = [helper.make_node("Loop", ["times", "", "x"], ["y"], name="loop", body=body)]
    inputs = {"x": (TensorProto.FLOAT, ["n", WIDTH])}
    weights = {"w": weight.astype(np.float32), "times": np.array(2)}
    before = saved(tmp_path / "a", nodes, inputs, {"y": TensorProto.FLOAT}, weights)
    after = quantized(tmp_path / "a", tmp_path / "b")
    assert operators(after)["MatMulInteger"] == 1
    feeds = {"x": rng.standard_normal((3, WIDTH), dtype=np.float32)}
    assert relative(answers(before, feeds)[0], answers(after, feeds)[0]) < 0.03


def test_an_attention_of_another_domain_is_left_alone_and_said(tmp_path: Path) -> None:
    rng = generator()
    weight = rng.standard_normal((8, 8), dtype=np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["q"], name="product"),
        helper.make_node(
            "Attention", ["q", "q", "q"], ["y"], name="heads", q_num_heads=2, kv_num_heads=2
        ),
    ]
    inputs = {"x": (TensorProto.FLOAT, ["n", "s", 8])}
    weights = {"w": weight}
    before = saved(tmp_path / "a", nodes, inputs, {"y": TensorProto.FLOAT}, weights, opset=23)
    with pytest.warns(OrtrainWarning, match="heads .an operator of another domain"):
        after = quantized(tmp_path / "a", tmp_path / "b")
    assert operators(after)["Attention"] == 1
    feeds = {"x": rng.standard_normal((2, 5, 8), dtype=np.float32)}
    assert relative(answers(before, feeds)[0], answers(after, feeds)[0]) < 0.03


def test_a_quantized_model_is_not_quantized_again(tmp_path: Path) -> None:
    classifier(tmp_path / "a")
    quantized(tmp_path / "a", tmp_path / "b")
    with pytest.raises(InputError, match="is quantized already"):
        quantized(tmp_path / "b", tmp_path / "c")


def test_a_model_of_which_nothing_would_be_quantized_is_an_error(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    saved(tmp_path / "a", nodes, {"x": (TensorProto.FLOAT, ["n"])}, {"y": TensorProto.FLOAT}, {})
    with pytest.raises(InputError, match=r"nothing of .* would be quantized"):
        quantized(tmp_path / "a", tmp_path / "b")


def test_an_old_opset_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    inputs = {"x": (TensorProto.FLOAT, ["n", 2])}
    weights = {"w": np.eye(2, dtype=np.float32)}
    saved(tmp_path / "a", nodes, inputs, {"y": TensorProto.FLOAT}, weights, opset=10)
    with pytest.raises(InputError, match="opset 10"):
        quantized(tmp_path / "a", tmp_path / "b")


def test_large_weights_that_stay_do_not_enter_the_quantizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ortrain.deploy.quantization.rewriting._LEFT_OUT", 16)
    before = classifier(tmp_path / "a")
    seen: list[int] = []
    from ortrain.deploy.quantization import rewriting

    rewrite = rewriting._rewrite

    def watched(proto: onnx.ModelProto, *more: Any) -> onnx.ModelProto:
        seen.extend(len(i.raw_data) for i in proto.graph.initializer if i.name == "b0")
        return rewrite(proto, *more)

    monkeypatch.setattr(rewriting, "_rewrite", watched)
    after = quantized(tmp_path / "a", tmp_path / "b")
    assert seen == [0]
    assert relative(answers(before, ids())[0], answers(after, ids())[0]) < NEARLY


def test_weights_beside_the_file_are_read_there_and_written_beside_the_new_one(
    tmp_path: Path,
) -> None:
    before = classifier(tmp_path / "a")
    model = onnx.load(before)
    onnx.save(model, before, save_as_external_data=True, location="model.onnx_data")
    sums = checksums(tmp_path / "a")
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a")
    quantizer.quantize(dynamic(), tmp_path / "b", use_external_data_format=True)
    after = tmp_path / "b" / "model_quantized.onnx"
    assert checksums(tmp_path / "a") == sums
    assert (tmp_path / "b" / "model_quantized.onnx_data").exists()
    assert ORTConfig.from_pretrained(tmp_path / "b").use_external_data_format
    assert relative(answers(before, ids())[0], answers(after, ids())[0]) < NEARLY


def test_a_product_that_stays_has_its_weight_in_full_where_a_table_shares_it(
    tmp_path: Path,
) -> None:
    rng = generator()
    table = rng.standard_normal((64, WIDTH), dtype=np.float32)
    nodes = [
        helper.make_node("Gather", ["w", "i"], ["rows"], name="gather"),
        helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "t"], ["y"], name="output"),
    ]
    inputs = {"i": (TensorProto.INT64, ["n"]), "x": (TensorProto.FLOAT, ["n", WIDTH])}
    outputs = {"rows": TensorProto.FLOAT, "y": TensorProto.FLOAT}
    before = saved(tmp_path / "a", nodes, inputs, outputs, {"w": table})
    after = quantized(tmp_path / "a", tmp_path / "b", dynamic(nodes_to_exclude=["output"]))
    feeds = {"i": np.arange(7), "x": rng.standard_normal((7, WIDTH), dtype=np.float32)}
    old, new = answers(before, feeds), answers(after, feeds)
    assert relative(old[1], new[1]) < 1e-6
    assert 1e-4 < relative(old[0], new[0]) < NEARLY


def attention(folder: Path, *, inputs: int = 4, **attributes: Any) -> Path:
    """onnxruntime's fused attention, as its optimizer and ours write it."""
    rng = generator()
    weights = {
        "w": rng.standard_normal((8, 24), dtype=np.float32),
        "b": rng.standard_normal(24, dtype=np.float32),
        "bias": rng.standard_normal((1, 2, 5, 5), dtype=np.float32),
    }
    names = ["x", "w", "b", "mask", "", "bias"][:inputs]
    node = helper.make_node(
        "Attention", names, ["y"], name="heads", domain="com.microsoft", num_heads=2, **attributes
    )
    taken = {
        "x": (TensorProto.FLOAT, ["n", 5, 8]),
        "mask": (TensorProto.INT32, ["n", 5]),
    }
    return saved(folder, [node], taken, {"y": TensorProto.FLOAT}, weights)


def masked() -> dict[str, np.ndarray]:
    mask = np.ones((2, 5), np.int32)
    mask[0, 3:] = 0
    return {"x": generator(4).standard_normal((2, 5, 8), dtype=np.float32), "mask": mask}


@pytest.mark.parametrize("per_channel", [True, False])
def test_fused_attention_is_quantized_with_its_mask(tmp_path: Path, per_channel: bool) -> None:
    before = attention(tmp_path / "a")
    after = quantized(tmp_path / "a", tmp_path / "b", dynamic(per_channel=per_channel))
    assert operators(after)["QAttention"] == 1
    assert relative(answers(before, masked())[0], answers(after, masked())[0]) < 0.03


@pytest.mark.parametrize("unidirectional", [0, 1])
def test_fused_attention_without_a_quantized_form_has_its_product_quantized(
    tmp_path: Path, unidirectional: int
) -> None:
    before = attention(tmp_path / "a", inputs=6, unidirectional=unidirectional)
    after = quantized(tmp_path / "a", tmp_path / "b")
    counts = operators(after)
    assert (counts["MatMulInteger"], counts["MultiHeadAttention"]) == (1, 1)
    assert relative(answers(before, masked())[0], answers(after, masked())[0]) < 0.03


@pytest.mark.parametrize("activation", ["Tanh", "Relu"])
def test_a_fused_gemm_is_quantized_with_its_activation_behind_it(
    tmp_path: Path, activation: str
) -> None:
    rng = generator()
    weights = {
        "w": rng.standard_normal((8, WIDTH), dtype=np.float32) / np.float32(8),
        "b": rng.standard_normal(8, dtype=np.float32),
    }
    node = helper.make_node(
        "FusedGemm",
        ["x", "w", "b"],
        ["y"],
        name="f",
        domain="com.microsoft",
        transB=1,
        activation=activation,
    )
    inputs = {"x": (TensorProto.FLOAT, ["n", WIDTH])}
    before = saved(tmp_path / "a", [node], inputs, {"y": TensorProto.FLOAT}, weights)
    after = quantized(tmp_path / "a", tmp_path / "b")
    assert (operators(after)["MatMulInteger"], operators(after)[activation]) == (1, 1)
    feeds = {"x": rng.standard_normal((3, WIDTH), dtype=np.float32)}
    assert relative(answers(before, feeds)[0], answers(after, feeds)[0]) < NEARLY


def test_a_recurrent_layer_is_quantized(tmp_path: Path) -> None:
    rng = generator()
    weights = {
        "w": rng.standard_normal((1, 32, 8), dtype=np.float32) / np.float32(3),
        "r": rng.standard_normal((1, 32, 8), dtype=np.float32) / np.float32(3),
        "b": rng.standard_normal((1, 64), dtype=np.float32) / np.float32(3),
    }
    node = helper.make_node("LSTM", ["x", "w", "r", "b"], ["y"], name="lstm", hidden_size=8)
    inputs = {"x": (TensorProto.FLOAT, ["length", "n", 8])}
    before = saved(tmp_path / "a", [node], inputs, {"y": TensorProto.FLOAT}, weights)
    after = quantized(tmp_path / "a", tmp_path / "b")
    assert operators(after)["DynamicQuantizeLSTM"] == 1
    feeds = {"x": rng.standard_normal((6, 2, 8), dtype=np.float32)}
    assert relative(answers(before, feeds)[0], answers(after, feeds)[0]) < 0.05

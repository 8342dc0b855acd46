"""What exporters write of real architectures: every product of each is quantized."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

from ortrain.deploy import export_onnx
from ortrain.deploy.model_folder import load_model
from ortrain.deploy.quantization import (
    AutoCalibrationConfig,
    AutoQuantizationConfig,
    ORTQuantizer,
    WeightOnlyConfig,
    constants,
    graph_nodes,
    preparation,
)
from tests.deploy.quantization.models import Arrays, answers, exact, operators, relative

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
_TEXT = {**_SIZES, "vocab_size": 80, "max_position_embeddings": 40, "num_labels": 3}


class Logits(torch.nn.Module):
    """The model with one output and arguments by position, as the exporter wants them."""

    def __init__(self, model: torch.nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        given: dict[str, Any] = dict(zip(self.names, values, strict=True))
        if "pixel_values" not in given:
            given |= {"use_cache": False} if hasattr(self.model, "generate") else {}
        logits: torch.Tensor = self.model(**given).logits
        return logits


def _text(rows: int = 2, length: int = 7, seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[0, 5:] = 0
    return {"input_ids": torch.randint(3, 80, (rows, length), generator=random)} | {
        "attention_mask": mask
    }


def _image(rows: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(rows, 3, 16, 16, generator=random)}


# Name → the model, how many products it has with the classes' or the words', and an input.
MODELS: dict[str, tuple[Any, int, Any]] = {
    "bert": (lambda: BertForSequenceClassification(BertConfig(**_TEXT)), 14, _text),
    "roberta": (
        lambda: RobertaForSequenceClassification(RobertaConfig(**_TEXT, pad_token_id=1)),
        14,
        _text,
    ),
    "distilbert": (
        lambda: DistilBertForSequenceClassification(
            DistilBertConfig(
                vocab_size=80,
                dim=32,
                n_layers=2,
                n_heads=2,
                hidden_dim=64,
                max_position_embeddings=40,
                num_labels=3,
            )
        ),
        14,
        _text,
    ),
    "gpt2": (
        lambda: GPT2LMHeadModel(
            GPT2Config(vocab_size=80, n_embd=32, n_layer=2, n_head=2, n_positions=40)
        ),
        9,
        _text,
    ),
    "llama": (
        lambda: LlamaForCausalLM(
            LlamaConfig(**_SIZES, vocab_size=80, num_key_value_heads=1, pad_token_id=0)
        ),
        15,
        _text,
    ),
    "vit": (
        lambda: ViTForImageClassification(
            ViTConfig(**_SIZES, image_size=16, patch_size=8, num_labels=3)
        ),
        13,
        _image,
    ),
}


@functools.cache
def _model(name: str) -> torch.nn.Module:
    torch.manual_seed(1)
    model: torch.nn.Module = MODELS[name][0]().eval()
    return model


def exported(name: str, exporter: str, folder: Path) -> tuple[Path, Arrays]:
    """The path of a model's file, and its inputs."""
    model, sample = _model(name), MODELS[name][2]()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.onnx"
    if exporter == "ortrain":
        export_onnx(model, [sample], path, outputs=["logits"])
    else:
        torch.onnx.export(
            Logits(model, tuple(sample)).eval(),
            tuple(sample.values()),
            path,
            input_names=list(sample),
            output_names=["logits"],
            dynamo=True,
            verbose=False,
        )
    return path, {key: value.numpy() for key, value in sample.items()}


CASES = [
    pytest.param("bert", "torch", marks=pytest.mark.breadth),
    pytest.param("gpt2", "torch"),
    pytest.param("bert", "ortrain"),
    pytest.param("roberta", "torch", marks=pytest.mark.breadth),
    pytest.param("distilbert", "torch", marks=pytest.mark.breadth),
    pytest.param("gpt2", "ortrain", marks=pytest.mark.breadth),
    pytest.param("llama", "torch", marks=pytest.mark.breadth),
    pytest.param("llama", "ortrain"),
    pytest.param("vit", "torch", marks=pytest.mark.breadth),
    pytest.param("vit", "ortrain", marks=pytest.mark.breadth),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
@pytest.mark.parametrize(("name", "exporter"), CASES)
def test_every_product_of_an_export_is_quantized(tmp_path: Path, name: str, exporter: str) -> None:
    before, feeds = exported(name, exporter, tmp_path / "a")
    wanted = MODELS[name][1]
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a")
    old = answers(before, feeds)[0]

    quantizer.quantize(exact(AutoQuantizationConfig.avx512_vnni(is_static=False)), tmp_path / "b")
    after = tmp_path / "b" / "model_quantized.onnx"
    counts = operators(after)
    assert counts["MatMulInteger"] == wanted
    assert counts.get("ConvInteger", 0) == (name == "vit")
    assert not left(after)
    assert 0 < relative(old, answers(after, feeds)[0]) < 0.05

    quantizer.quantize(WeightOnlyConfig(bits=8, block_size=16), tmp_path / "c")
    few = tmp_path / "c" / "model_quantized.onnx"
    assert operators(few)["MatMulNBits"] == wanted
    assert 0 < relative(old, answers(few, feeds)[0]) < 0.02

    found = quantizer.fit([feeds], AutoCalibrationConfig.minmax())
    static = exact(AutoQuantizationConfig.avx512_vnni(is_static=True))
    quantizer.quantize(static, tmp_path / "d", calibration_tensors_range=found)
    pairs = tmp_path / "d" / "model_quantized.onnx"
    assert len(integers(pairs)) >= wanted
    assert 0 < relative(old, answers(pairs, feeds)[0]) < 0.15


def left(path: Path) -> list[str]:
    """Products with a constant weight that are floating point still."""
    model = load_model(path)
    preparation.prepare(model, gemm=False, wanted=lambda node: True)
    return [node.op_type for node in constants.products(model)]


def integers(path: Path) -> list[str]:
    """Products that read a weight of eight bits through DequantizeLinear."""
    model = load_model(path)
    found = []
    for node in graph_nodes.nodes(model):
        if node.op_type not in ("MatMul", "Gemm", "Conv") or node.inputs[1] is None:
            continue
        producer = node.inputs[1].producer()
        while producer is not None and producer.op_type == "Transpose":
            value = producer.inputs[0]
            producer = None if value is None else value.producer()
        if producer is None or producer.op_type != "DequantizeLinear":
            continue
        weight = producer.inputs[0]
        if weight is not None and weight.const_value is not None:
            assert weight.const_value.dtype in (ir.DataType.INT8, ir.DataType.UINT8)
            found.append(node.name or "")
    return found


def test_a_weight_that_is_shared_with_a_padded_table_keeps_its_answers(tmp_path: Path) -> None:
    """GPT-2's words are its output layer: the file has both, each in its own form."""
    model = _model("gpt2")
    path = tmp_path / "a" / "model.onnx"
    export_onnx(model, [_text()], path, outputs=["logits"])
    feeds = {key: value.numpy() for key, value in _text().items()}
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "a")
    quantizer.quantize(AutoQuantizationConfig.avx2(is_static=False), tmp_path / "b")
    after = tmp_path / "b" / "model_quantized.onnx"
    tables = [
        value.const_value
        for value in load_model(after).graph.initializers.values()
        if value.const_value is not None and value.const_value.size == 80 * 32
    ]
    assert {each.dtype for each in tables} == {ir.DataType.UINT8}
    assert np.isfinite(answers(after, feeds)[0]).all()
    assert relative(answers(path, feeds)[0], answers(after, feeds)[0]) < 0.05


@pytest.mark.parametrize("name", ["bert", pytest.param("gpt2", marks=pytest.mark.breadth)])
def test_every_product_of_an_optimized_export_is_quantized(tmp_path: Path, name: str) -> None:
    from ortrain.deploy import AutoOptimizationConfig, ORTOptimizer

    before, feeds = exported(name, "ortrain", tmp_path / "a")
    ORTOptimizer.from_pretrained(tmp_path / "a").optimize(
        AutoOptimizationConfig.O2(), tmp_path / "o"
    )
    old = answers(before, feeds)[0]
    quantizer = ORTQuantizer.from_pretrained(tmp_path / "o")
    ranges = quantizer.fit([feeds], AutoCalibrationConfig.minmax())
    for index, (config, limit) in enumerate(
        (
            (exact(AutoQuantizationConfig.avx512_vnni(is_static=False)), 0.05),
            (exact(AutoQuantizationConfig.avx512_vnni(is_static=True)), 0.15),
            (WeightOnlyConfig(bits=8, block_size=16), 0.02),
        )
    ):
        target = tmp_path / str(index)
        quantizer.quantize(config, target, calibration_tensors_range=ranges)
        after = next(target.glob("*.onnx"))
        assert not left(after)
        assert 0 < relative(old, answers(after, feeds)[0]) < limit

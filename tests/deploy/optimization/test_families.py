"""Exports of many families: one attention a layer, and the answers that they gave before."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from ortrain import OrtrainWarning
from ortrain.deploy.optimization import AutoOptimizationConfig, ORTOptimizer
from ortrain.deploy.optimization.fusions import fuse
from ortrain.deploy.optimization.half import floats_left
from tests.breadth import sampled
from tests.deploy.optimization import exports
from tests.deploy.optimization.exports import BATCHES, LAYERS, TEXT, arrays
from tests.deploy.optimization.graphs import operators

ATTENTION = {"Attention", "MultiHeadAttention", "GroupQueryAttention"}
OURS = {"exporter": "ortrain", "opset": 21}
EXPORTS: dict[str, dict[str, Any]] = {
    "dynamo, sdpa": {"exporter": "dynamo"},
    "dynamo, eager": {"exporter": "dynamo", "attention": "eager"},
    "dynamo, sdpa, opset 23": {"exporter": "dynamo", "opset": 23},
    "dynamo, sdpa, no mask": {"exporter": "dynamo", "masked": False},
    "torchscript, sdpa, opset 14": {"exporter": "torchscript", "opset": 14},
    "torchscript, sdpa": {"exporter": "torchscript"},
    "torchscript, eager": {"exporter": "torchscript", "attention": "eager"},
    "torchscript, eager, opset 14": {
        "exporter": "torchscript",
        "attention": "eager",
        "opset": 14,
    },
    "torchscript, sdpa, no mask": {"exporter": "torchscript", "masked": False},
    "ortrain": OURS,
    "ortrain, no mask": {**OURS, "masked": False},
}
# Without a mask, their code asks for differences of positions (aten::diff), of which the older
# exporter knows nothing.
_DIFFERENCES = {
    "falcon", "gpt2", "gpt_neox", "llama", "llama whose heads share nothing", "mistral", "qwen3",
    "gemma", "phi",
}  # fmt: skip
# Its positions are bfloat16 on the way, which onnxruntime does not multiply: nothing can run it.
UNRUN = "falcon whose positions are added"
CASES = {
    f"{name}, {how}": (name, how)
    for name in TEXT
    for how in EXPORTS
    if name != UNRUN and not (name in _DIFFERENCES and how == "torchscript, sdpa, no mask")
    # Opset 23's operator is not written of keys over which the products broadcast.
    if (name, how) != ("falcon", "dynamo, sdpa, opset 23")
}
SAMPLE = [
    "bert, dynamo, sdpa", "gpt2, dynamo, eager", "llama, dynamo, sdpa", "bert, ortrain",
    "bert, torchscript, sdpa", "gpt2, torchscript, eager, opset 14", "llama, torchscript, sdpa",
    "bloom, torchscript, eager", "falcon, torchscript, sdpa",
]  # fmt: skip
OTHERS = {
    f"{name}, {how}": (name, how)
    for name in (*exports.PAIRS, *exports.VISION)
    for how in (
        "dynamo, sdpa",
        "dynamo, eager",
        "ortrain",
        "torchscript, sdpa",
        "torchscript, eager",
        "torchscript, sdpa, opset 14",
        "torchscript, eager, opset 14",
    )
    # Which torch 2.13 does not decompose, and what has differences of positions.
    if (name, how) not in {("t5", "dynamo, sdpa"), ("swin", "dynamo, sdpa")}
    and not (name == "whisper" and how.startswith("torchscript"))
}


@functools.cache
def session(path: Path, level: str = "ORT_ENABLE_ALL") -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def assert_alike(
    module: torch.nn.Module,
    before: Path,
    after: Path,
    batches: list[dict[str, torch.Tensor]],
    runs: bool = True,
) -> None:
    """Both files answer as the module does, for batches of every size and padding.

    Of padding on the left, an exporter and PyTorch make different things; the files do not. Where
    onnxruntime refuses the first one, as the rotary embeddings of opset 23 for several rows, that
    is left out.
    """
    for batch in batches:
        feeds = arrays(batch)
        found = session(after).run(None, feeds)[0]
        with torch.no_grad():
            answer = module(*batch.values()).numpy()
        if runs:
            expected = session(before, "ORT_DISABLE_ALL").run(None, feeds)[0]
            np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)
        mask = feeds.get("attention_mask")
        if mask is not None and mask.shape == answer.shape[:-1]:
            found, answer = found[mask == 1], answer[mask == 1]
        np.testing.assert_allclose(found, answer, atol=1e-4, rtol=1e-4)


def optimized(path: Path, layers: int) -> Path:
    """The file after O2, which has one attention for each layer."""
    optimizer = ORTOptimizer.from_pretrained(path)
    target = optimizer.optimize(AutoOptimizationConfig.O2(), path.parent / "optimized")
    written = target / "model_optimized.onnx"
    counts = operators(ir.load(written))
    found = sum(counts[kind] for kind in ATTENTION)
    assert found == layers, (counts, optimizer.reports["model.onnx"].refused)
    assert not layers or not counts["Softmax"]
    return written


@pytest.mark.parametrize("case", sampled(CASES, SAMPLE))
def test_each_layer_has_one_attention(tmp_path: Path, case: str) -> None:
    name, how = CASES[case]
    form = EXPORTS[how]
    module, path = exports.exported(name, tmp_path / "model.onnx", **form)
    names = ["input_ids"] if form.get("masked") is False else ["input_ids", "attention_mask"]
    batches = [{name: batch[name] for name in names} for batch in BATCHES]
    layers = LAYERS
    rotates = operators(ir.load(path))["RotaryEmbedding"] > 0
    assert_alike(module, path, optimized(path, layers), batches, runs=not rotates)


@pytest.mark.breadth
@pytest.mark.parametrize("how", ["torchscript, sdpa", "dynamo, eager"])
def test_what_onnxruntime_cannot_run_is_fused_too(tmp_path: Path, how: str) -> None:
    _, path = exports.exported(UNRUN, tmp_path / "model.onnx", **EXPORTS[how])
    model = ir.load(path)
    fuse(model, AutoOptimizationConfig.O2())
    counts = operators(model)
    assert sum(counts[kind] for kind in ATTENTION) == LAYERS
    assert not counts["Softmax"]


OF_OTHERS = [
    "t5, ortrain",
    "vit, dynamo, sdpa",
    "t5, torchscript, sdpa",
    "swin, torchscript, eager",
]


@pytest.mark.parametrize("case", sampled(OTHERS, OF_OTHERS))
def test_encoders_with_decoders_and_models_of_pictures_too(tmp_path: Path, case: str) -> None:
    name, how = OTHERS[case]
    module, path, batches = exports.exported_other(name, tmp_path / "model.onnx", **EXPORTS[how])
    layers = LAYERS if name in exports.VISION else 3 * LAYERS
    rotates = operators(ir.load(path))["RotaryEmbedding"] > 0
    assert_alike(module, path, optimized(path, layers), batches, runs=not rotates)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    path = tmp_path_factory.mktemp("bert") / "model.onnx"
    return exports.exported("bert", path, **OURS)


@pytest.mark.parametrize(("level", "tolerance"), [("O1", 1e-5), ("O3", 2e-3), ("O4", 3e-2)])
def test_each_level_keeps_the_answers(
    classifier: tuple[torch.nn.Module, Path], tmp_path: Path, level: str, tolerance: float
) -> None:
    _, path = classifier
    config = AutoOptimizationConfig.with_optimization_level(level, for_gpu=level == "O4")
    optimizer = ORTOptimizer.from_pretrained(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OrtrainWarning)  # no CUDA here
        optimizer.optimize(config, tmp_path / "optimized")
    written = tmp_path / "optimized" / "model_optimized.onnx"
    for batch in BATCHES:
        found, expected = (session(p).run(None, arrays(batch))[0] for p in (written, path))
        np.testing.assert_allclose(found, expected, atol=tolerance)
    if level == "O4":
        model = ir.load(written)
        assert not list(floats_left(model))
        assert {v.dtype for v in model.graph.outputs} == {ir.DataType.FLOAT}
        assert operators(model)["SkipLayerNormalization"] == 2 * LAYERS + 1

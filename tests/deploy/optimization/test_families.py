"""Exports of many families: one attention a layer, and the answers that they gave before."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from ortrain.deploy.optimization import AutoOptimizationConfig, ORTOptimizer
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
    "ortrain": OURS,
    "ortrain, no mask": {**OURS, "masked": False},
}
CASES = {f"{name}, {how}": (name, how) for name in TEXT for how in EXPORTS}
SAMPLE = ["bert, dynamo, sdpa", "gpt2, dynamo, eager", "llama, dynamo, sdpa", "bert, ortrain"]
# What a model's attention is fused into, as far as it is not `Attention`.
INTO = {
    "llama": "GroupQueryAttention",
    "mistral": "GroupQueryAttention",
    "qwen3": "GroupQueryAttention",
    "gemma": "GroupQueryAttention",
    "phi": "GroupQueryAttention",
}


@functools.cache
def session(path: Path, level: str = "ORT_ENABLE_ALL") -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def assert_alike(module: torch.nn.Module, before: Path, after: Path, masked: bool = True) -> None:
    """Both files answer as the module does, for batches of every size and padding."""
    for batch in BATCHES:
        given = batch if masked else {"input_ids": batch["input_ids"]}
        feeds = arrays(given)
        found = session(after).run(None, feeds)[0]
        expected = session(before, "ORT_DISABLE_ALL").run(None, feeds)[0]
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)
        with torch.no_grad():
            answer = module(*given.values()).numpy()
        np.testing.assert_allclose(found, answer, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "how"), sampled(CASES, SAMPLE))
def test_each_layer_has_one_attention(tmp_path: Path, name: str, how: str) -> None:
    form = EXPORTS[how]
    module, path = exports.exported(name, tmp_path / "model.onnx", **form)
    optimizer = ORTOptimizer.from_pretrained(path)
    optimizer.optimize(AutoOptimizationConfig.O2(), tmp_path / "optimized")
    written = tmp_path / "optimized" / "model_optimized.onnx"
    counts = operators(ir.load(written))
    assert sum(counts[kind] for kind in ATTENTION) == LAYERS, (
        counts, optimizer.reports["model.onnx"]
    )  # fmt: skip
    assert not counts["Softmax"]
    assert_alike(module, path, written, form.get("masked", True))

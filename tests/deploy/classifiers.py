"""Small ONNX models of bags of words, whose answers a test can say beforehand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

WORDS, CLASSES = 16, 3
Weights = dict[str, np.ndarray]

_HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
_MEAN = """
    words = Gather(table, input_ids)
    zero_one = Cast<to: int = 1>(attention_mask)
    last = Constant<value_ints: ints = [-1]>()
    seen = Unsqueeze(zero_one, last)
    masked = Mul(words, seen)
    one = Constant<value_ints: ints = [1]>()
    sums = ReduceSum<keepdims: int = 0>(masked, one)
    count = ReduceSum<keepdims: int = 1>(zero_one, one)
    mean = Div(sums, count)
"""
_INPUTS = "int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask"
GRAPHS = {
    "classification": f"g ({_INPUTS}) => (float[batch, classes] logits) {{{_MEAN}"
    "    product = MatMul(mean, weight)\n    logits = Add(product, bias)\n}",
    "tokens": f"g ({_INPUTS}) => (float[batch, sequence, classes] logits) {{\n"
    "    words = Gather(table, input_ids)\n    product = MatMul(words, weight)\n"
    "    logits = Add(product, bias)\n    kept = Identity(attention_mask)\n}",
    "answers": f"g ({_INPUTS}) => (float[batch, sequence] start_logits, "
    "float[batch, sequence] end_logits) {\n    words = Gather(table, input_ids)\n"
    "    product = MatMul(words, weight)\n    both = Add(product, bias)\n"
    "    zero = Constant<value_int: int = 0>()\n    one = Constant<value_int: int = 1>()\n"
    "    start_logits = Gather<axis: int = 2>(both, zero)\n"
    "    end_logits = Gather<axis: int = 2>(both, one)\n}",
    "features": f"g ({_INPUTS}) => (float[batch, sequence, width] last_hidden_state) {{\n"
    "    last_hidden_state = Gather(table, input_ids)\n}",
}


def weights(seed: int = 0, classes: int = CLASSES) -> Weights:
    """Words of the first third are of class 0, and so on, with some noise."""
    noise = np.random.default_rng(seed)
    table = noise.standard_normal((WORDS, classes)) * 0.1
    table[np.arange(WORDS), np.arange(WORDS) % classes] += 1
    return {
        "table": table.astype(np.float32),
        "weight": np.eye(classes, dtype=np.float32) * 4,
        "bias": np.zeros(classes, np.float32),
    }


def graph(kind: str, given: Weights | None = None, **changes: Any) -> onnx.ModelProto:
    """One of GRAPHS with its weights; changes replace some of them."""
    model = onnx.parser.parse_model(_HEAD + GRAPHS[kind])
    tensors = {**(weights() if given is None else given), **changes}
    used = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value, np.float32), name)
        for name, value in tensors.items()
        if name in used
    )
    return model


def folder(
    path: Path,
    model: onnx.ModelProto | None = None,
    *,
    name: str = "model.onnx",
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A folder with a model and its configuration."""
    path.mkdir(parents=True, exist_ok=True)
    onnx.save(graph("classification") if model is None else model, path / name)
    said = {
        "architectures": ["BertForSequenceClassification"],
        "id2label": {"0": "red", "1": "green", "2": "blue"},
    }
    (path / "config.json").write_text(json.dumps(said if config is None else config))
    return path


def batches(
    sizes: tuple[tuple[int, int], ...] = ((4, 5), (4, 3), (2, 7)), seed: int = 1
) -> tuple[list[dict[str, np.ndarray]], np.ndarray]:
    """Batches of sizes (examples, words), padded at the end, and the class of most of the words."""
    noise = np.random.default_rng(seed)
    made, labels = [], []
    for count, length in sizes:
        label = noise.integers(0, CLASSES, count)
        ids = noise.integers(0, WORDS // CLASSES, (count, length)) * CLASSES + label[:, None]
        mask = np.arange(length) < noise.integers(1, length + 1, count)[:, None]
        made.append({"input_ids": np.where(mask, ids, 0), "attention_mask": mask.astype(np.int64)})
        labels.extend(label)
    return made, np.asarray(labels)

"""Small models in folders, as exporters of several kinds write them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from ortrain.deploy.quantization import QuantType
from ortrain.deploy.quantization.processor import Processor

Arrays = dict[str, np.ndarray]
WORDS, WIDTH = 50, 32


def saved(
    folder: Path,
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[int, list[Any]]],
    outputs: dict[str, int],
    weights: Arrays,
    *,
    name: str = "model.onnx",
    opset: int = 21,
) -> Path:
    """Writes a model and an empty configuration into a folder; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(n, kind, shape) for n, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info(n, kind, None) for n, kind in outputs.items()],
        [numpy_helper.from_array(array, n) for n, array in weights.items()],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    onnx.save(model, folder / name)
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    return folder / name


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def classifier(folder: Path, *, layers: int = 2, seed: int = 0, **more: Any) -> Path:
    """An embedding, layers of a product with a bias and GELU, a mean and a product with classes.

    Products are written in the ways of exporters: a transposed weight, Gemm, one as it is.
    """
    rng = generator(seed)
    weights: Arrays = {"table": rng.standard_normal((WORDS, WIDTH), dtype=np.float32)}
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["h0"], name="embedding")]
    for layer in range(layers):
        weight = rng.standard_normal((WIDTH, WIDTH), dtype=np.float32) / np.sqrt(WIDTH)
        weights[f"w{layer}"] = weight.astype(np.float32)
        weights[f"b{layer}"] = rng.standard_normal(WIDTH, dtype=np.float32) * np.float32(0.1)
        nodes += [
            helper.make_node("Transpose", [f"w{layer}"], [f"t{layer}"], perm=[1, 0]),
            helper.make_node(
                "MatMul", [f"h{layer}", f"t{layer}"], [f"m{layer}"], name=f"product_{layer}"
            ),
            helper.make_node(
                "Add", [f"m{layer}", f"b{layer}"], [f"a{layer}"], name=f"bias_{layer}"
            ),
            helper.make_node("Gelu", [f"a{layer}"], [f"h{layer + 1}"], name=f"gelu_{layer}"),
        ]
    weights["axes"] = np.array([1], np.int64)
    weights["head"] = rng.standard_normal((4, WIDTH), dtype=np.float32)
    weights["head_bias"] = np.arange(4, dtype=np.float32) / 10
    nodes += [
        helper.make_node("ReduceMean", [f"h{layers}", "axes"], ["pooled"], keepdims=0, name="mean"),
        helper.make_node(
            "Gemm", ["pooled", "head", "head_bias"], ["logits"], transB=1, name="classes"
        ),
    ]
    inputs = {"input_ids": (TensorProto.INT64, ["batch", "sequence"])}
    return saved(folder, nodes, inputs, {"logits": TensorProto.FLOAT}, weights, **more)


def ids(rows: int = 4, length: int = 6, seed: int = 1) -> Arrays:
    return {"input_ids": generator(seed).integers(0, WORDS, (rows, length))}


# Without VNNI, onnxruntime adds two products of u8 and s8 in 16 bits.
OVERFLOWS = Processor.host().preset == "avx2"


def exact(config: Any) -> Any:
    """The configuration, in seven bits where products with its weights could overflow."""
    if not OVERFLOWS or getattr(config, "weights_dtype", None) != QuantType.QInt8:
        return config
    return dataclasses.replace(config, reduce_range=True)


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def answers(path: Path, feeds: Arrays) -> list[np.ndarray]:
    run = session(path)
    names = {value.name for value in run.get_inputs()}
    found: list[np.ndarray] = run.run(None, {n: a for n, a in feeds.items() if n in names})
    return found


def checksums(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.is_file()
    }


def operators(path: Path) -> dict[str, int]:
    """Operator → how many nodes, those of sub-graphs too."""
    counts: dict[str, int] = {}

    def walk(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            counts[node.op_type] = counts.get(node.op_type, 0) + 1
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    walk(attribute.g)

    walk(onnx.load(path, load_external_data=False).graph)
    return counts


def relative(before: np.ndarray, after: np.ndarray) -> float:
    """The difference's norm over the norm before."""
    return float(np.linalg.norm(before - after) / np.linalg.norm(before))

"""Small graphs written as text, with drawn weights, and what two of them answer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from ortrain.deploy.optimization import OptimizationConfig
from ortrain.deploy.optimization.fusions import Report, fuse


def graph(signature: str, body: str, weights: str = "", opset: int = 20) -> ir.Model:
    """A model of a text.

    Args:
        signature: ``(float[batch,seq,8] x) => (float[batch,seq,8] y)``.
        body: the nodes.
        weights: initializers whose numbers are drawn: ``"float[8,8] w, float[8] b"``; those with
            numbers, ``float s = {2.0}``, keep these.
        opset: of the standard domain.
    """
    given = re.findall(r"(\w+(?:\[[\d,]*\])?) (\w+)( = \{[^}]*\})?", weights)
    drawn = ", ".join(f"{kind} {name}" for kind, name, numbers in given if not numbers)
    fixed = ", ".join(f"{kind} {name}{numbers}" for kind, name, numbers in given if numbers)
    inputs, outputs = signature.split("=>")
    inputs = inputs.strip()[1:-1] + (f", {drawn}" if drawn else "")
    text = f'<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>\n'
    text += f"g ({inputs}) => {outputs.strip()} <{fixed}> {{ {body} }}"
    model = ir.from_onnx_text(text)
    generator = np.random.default_rng(3)
    names = {name for _, name, numbers in given if not numbers}
    for value in [v for v in model.graph.inputs if v.name in names]:
        assert value.shape is not None
        assert value.dtype is not None
        model.graph.inputs.remove(value)
        numbers = generator.standard_normal(tuple(value.shape)).astype(value.dtype.numpy())
        value.const_value = ir.tensor(numbers, name=value.name)
        model.graph.register_initializer(value)
    return model


def fused(model: ir.Model, **options: Any) -> tuple[ir.Model, Report]:
    """A copy with the fusions made, and their report."""
    copy = ir.from_proto(ir.to_proto(model))
    return copy, fuse(copy, OptimizationConfig(**options))


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.all_nodes())


def answers(model: ir.Model, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """What onnxruntime gives without any rewrite of its own."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    content = ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return session.run(None, dict(feeds))


def assert_same(
    before: ir.Model, after: ir.Model, *feeds: Mapping[str, np.ndarray], atol: float = 1e-5
) -> None:
    """Both answer alike, NaN where NaN was."""
    for feed in feeds:
        for a, b in zip(answers(before, feed), answers(after, feed), strict=True):
            np.testing.assert_allclose(b, a, atol=atol, rtol=1e-5)


def draw(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)

"""Standard operators that differentiate through the function body in their schema."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ortrain.graph.build import Builder
from ortrain.graph.function_body import function_body
from ortrain.graph.rewire import take_place
from ortrain.ops.base import attributes_of

# Operators without a rule whose body holds operators with rules, and no sub-graph.
DECOMPOSES = {
    "Attention": "softmax(scale * Q Kᵀ + mask) V, by its function body",
    "CenterCropPad": "Pad and Slice, by its function body",
    "RotaryEmbedding": "products with cos and sin, by its function body",
    "SwiGLU": "swish(x) * gate, by its function body",
}


def decompose(node: ir.Node, opset: int) -> None:
    """Replaces a node of the standard domain by the function body of its operator.

    Args:
        node: its inputs have dtypes and ranks.
        opset: of the standard domain.
    """
    function = function_body(node, opset)
    assert function is not None
    given = list(node.inputs) + [None] * (len(function.input) - len(node.inputs))
    values: dict[str, ir.Value | None] = {"": None, **dict(zip(function.input, given, strict=True))}
    builder = Builder.before(node, opset=opset)
    with builder as op:
        for inner in function.node:
            attributes = _attributes(inner, node, function)
            if inner.op_type == "Constant":
                values[inner.output[0]] = op.constant(_constant(attributes))
                continue
            results = op.node(
                inner.op_type,
                [values[name] for name in inner.input],
                outputs=len(inner.output),
                **attributes,
            )
            results = (results,) if isinstance(results, ir.Value) else results
            values.update(zip(inner.output, results, strict=True))
        for old, name in zip(node.outputs, function.output, strict=False):
            take_place(op.Identity(values[name]), old)
    assert builder.graph is not None
    builder.graph.remove(node, safe=True)


def _attributes(
    inner: onnx.NodeProto, node: ir.Node, function: onnx.FunctionProto
) -> dict[str, Any]:
    """The attributes of a node of the body, references to the operator's own ones resolved."""
    defaults = {attribute.name: attribute for attribute in function.attribute_proto}
    result: dict[str, Any] = {}
    for attribute in inner.attribute:
        source = attribute
        if attribute.ref_attr_name:
            if attribute.ref_attr_name in node.attributes:
                result[attribute.name] = attributes_of(node)[attribute.ref_attr_name]
                continue
            if attribute.ref_attr_name not in defaults:
                continue
            source = defaults[attribute.ref_attr_name]
        value = onnx.helper.get_attribute_value(source)
        result[attribute.name] = value.decode() if isinstance(value, bytes) else value
    return result


def _constant(attributes: dict[str, Any]) -> np.ndarray:
    ((kind, value),) = attributes.items()
    if kind == "value":
        return onnx.numpy_helper.to_array(value)
    return np.asarray(value, np.float32 if "float" in kind else np.int64)

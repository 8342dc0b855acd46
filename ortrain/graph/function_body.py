"""The function bodies that ONNX's schemas have for operators made of others."""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir


def function_body(node: ir.Node, opset: int) -> onnx.FunctionProto | None:
    """The body of a node's operator, defaults of its attributes included.

    Args:
        node: of the standard domain; its inputs have dtypes, where the body depends on them.
        opset: of the standard domain.

    Returns:
        The function, or None where the operator is defined by itself, or the body depends on more
        than is known.
    """
    try:
        schema: Any = onnx.defs.get_schema(node.op_type, opset)
    except onnx.defs.SchemaError:
        return None
    if versions := [v for v in schema.function_opset_versions if v <= opset]:
        found = schema.get_function_with_opset_version(max(versions))
    elif versions := [v for v in schema.context_dependent_function_opset_versions if v <= opset]:
        plain = ir.to_proto(node).SerializeToString()
        found = schema.get_context_dependent_function_with_opset_version(
            max(versions), plain, _types(node)
        )
    else:
        return None
    function = onnx.FunctionProto()
    function.ParseFromString(found)
    if not function.node:
        return None
    for name in list(function.attribute):
        default = schema.attributes[name].default_value
        if default.type:
            function.attribute.remove(name)
            function.attribute_proto.append(default)
    return function


def _types(node: ir.Node) -> list[bytes]:
    types = []
    for value in node.inputs:
        proto = onnx.TypeProto()
        if value is not None and value.type is not None:
            ir.serde.serialize_type_into(proto, value.type)
            if value.shape is not None:
                ir.serde.serialize_shape_into(proto, value.shape)
        types.append(proto.SerializeToString())
    return types

"""Attention in a graph: one operator, or two products with a softmax between them."""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph import shapes

# What stands between the product of query and key and that with the values.
_ELEMENTWISE = {"Add", "Cast", "Div", "Dropout", "Mul", "Sub", "Where"}


def attention_of(node: ir.Node) -> list[ir.Node]:
    """The nodes of an attention, in order: that with query and key first, that with values last.

    Args:
        node: ``ortrain::Attention``, or the softmax of one that is spelled out.

    Returns:
        Empty where the node is neither.
    """
    if (node.domain, node.op_type) == ("ortrain", "Attention"):
        return [node]
    if node.domain or node.op_type != "Softmax":
        return []
    above, below = _from_product(node.inputs[0]), _to_product(node.outputs[0])
    return [*above, node, *below] if above and below else []


def is_product(node: ir.Node) -> bool:
    """Whether a node is a product of matrices."""
    return node.op_type == "MatMul" and not node.domain


def _from_product(value: ir.Value | None) -> list[ir.Node]:
    """A product and what of its size makes the value of it; empty where none does."""
    node = None if value is None else value.producer()
    if value is None or node is None:
        return []
    if is_product(node):
        return [node]
    if node.op_type not in _ELEMENTWISE:
        return []
    same = (v for v in node.inputs if v is not None and shapes.dims(v) == shapes.dims(value))
    return next(([*found, node] for v in same if (found := _from_product(v))), [])


def _to_product(value: ir.Value) -> list[ir.Node]:
    """What of its size is made of the value, and the product whose left side that is."""
    for use in value.uses():
        node = use.node
        if is_product(node) and use.idx == 0:
            return [node]
        same = shapes.dims(node.outputs[0]) == shapes.dims(value)
        if node.op_type in _ELEMENTWISE and same and (found := _to_product(node.outputs[0])):
            return [node, *found]
    return []

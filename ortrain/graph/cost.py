"""How much arithmetic a graph does, roughly: what decides whether threads pay."""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx_ir as ir

from ortrain.graph import shapes


def multiplications(graph: ir.Graph, sizes: Mapping[str, int]) -> int:
    """Multiplications of all matrix products and convolutions, plus one for every other element.

    Args:
        graph: composites count as one node.
        sizes: value of each symbolic dimension; unknown dimensions count as 1.
    """
    return sum(_node(node, sizes) for node in graph)


def _node(node: ir.Node, sizes: Mapping[str, int]) -> int:
    elements = sum(_elements(v, sizes) for v in node.outputs)
    if node.op_type in ("MatMul", "Gemm", "FusedMatMul"):
        left = shapes.dims(node.inputs[0])
        flipped = node.attributes.get("transA")
        if left:
            return elements * _size(left[-2 if flipped and flipped.as_int() else -1], sizes)
    if node.op_type in ("Conv", "ConvTranspose"):
        kernel = shapes.dims(node.inputs[1])
        if kernel:
            return elements * math.prod(_size(d, sizes) for d in kernel[1:])
    if node.op_type == "Attention":
        keys = shapes.dims(node.inputs[1])
        if keys and len(keys) > 1:
            return 2 * elements * _size(keys[-2], sizes)
    return elements


def _elements(value: ir.Value, sizes: Mapping[str, int]) -> int:
    return math.prod(_size(d, sizes) for d in shapes.dims(value) or ())


def _size(dim: shapes.Dim, sizes: Mapping[str, int]) -> int:
    return dim if isinstance(dim, int) else sizes.get(dim or "", 1)

"""Nodes of a graph, as quantizers look at them: which there are, and what takes their place."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import onnx_ir as ir

from ortrain.errors import InputError, listing

STANDARD = ("", "ai.onnx")
MICROSOFT = "com.microsoft"
QUANTIZED = {
    "ConvInteger",
    "DequantizeLinear",
    "DynamicQuantizeLSTM",
    "DynamicQuantizeLinear",
    "DynamicQuantizeMatMul",
    "GatherBlockQuantized",
    "MatMulBnb4",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "MatMulNBits",
    "QAttention",
    "QGemm",
    "QLinearConv",
    "QLinearMatMul",
    "QuantizeLinear",
}
# Quantized operators are found by their bare names; these are of onnxruntime's domain.
OF_MICROSOFT = {"Attention", "EmbedLayerNormalization"}


def nodes(model: ir.Model) -> Iterator[ir.Node]:
    """All nodes of a model, those of sub-graphs too."""
    for graph in model.graphs():
        yield from graph


def opset(model: ir.Model) -> int:
    """The version of ONNX's operators that a model is of."""
    return model.opset_imports.get("", model.opset_imports.get("ai.onnx", 0))


def standard(node: ir.Node, *operators: str) -> bool:
    """Whether a node is of the standard domain, and one of these operators."""
    return node.domain in STANDARD and node.op_type in operators


def attribute(node: ir.Node, name: str, default: Any) -> Any:
    """The value of an attribute of a node."""
    found = node.attributes.get(name)
    return default if found is None or found.is_ref() else found.value


def put(node: ir.Node, made: list[ir.Node]) -> None:
    """Nodes in the place of one; the last one's result has its result's name, type and shape."""
    assert node.graph is not None
    ir.convenience.replace_nodes_and_values(
        node.graph, node, [node], made, [node.outputs[0]], [made[-1].outputs[0]]
    )


def expect_known(model: ir.Model, names: Collection[str], argument: str) -> None:
    """Raises where a name is of no node.

    Raises:
        ValueError: it is not.
    """
    known = {node.name for node in nodes(model)}
    if missing := [name for name in names if name not in known]:
        raise ValueError(
            f"{argument} has {listing([repr(name) for name in missing])}, and the model has no "
            f"such node; its nodes are named as {listing(sorted(n for n in known if n), 3)}"
        )


def expect_float(model: ir.Model, file: str) -> None:
    """Raises where a model has quantized operators already.

    Raises:
        InputError: it has.
    """
    if found := sorted({node.op_type for node in nodes(model)} & QUANTIZED):
        raise InputError(
            f"{file} is quantized already",
            because=f"it has operators {listing(found)}",
            help="quantize the model that it was made from",
        )


def misnamed(model: ir.Model, operators: Collection[str]) -> list[str]:
    """Nodes that have a quantizable operator's bare name and are another one.

    onnxruntime's quantizer does not look at domains: it took ONNX's own Attention for its.
    """
    return [
        node.name or ""
        for node in nodes(model)
        if node.op_type in operators
        and node.domain not in ((MICROSOFT,) if node.op_type in OF_MICROSOFT else STANDARD)
    ]

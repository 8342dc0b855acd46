"""onnxruntime's fused operators whose products have no quantized form, as products and the rest.

What an optimizer has fused is taken apart as far as a quantizer needs: of an ``Attention`` with a
bias of its scores the product with the weights of queries, keys and values, which is the larger
part; the attention itself stays one operator.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortrain.deploy.quantization import constants, graph_nodes

_PLAIN = {"Elu", "Relu", "Sigmoid", "Tanh"}
# Attributes of Attention that MultiHeadAttention has as well.
_COMMON = {"mask_filter_value", "num_heads", "scale", "unidirectional"}
# Those of its quantized form.
_QATTENTION = {*_COMMON, "past_present_share_buffer"}


def has_quantized_form(node: ir.Node) -> bool:
    """Whether onnxruntime's quantizer makes a QAttention of an Attention."""
    return (
        constants.weight(node) is not None
        and set(node.attributes) <= _QATTENTION
        and not any(node.inputs[5:])
    )


def take_apart(model: ir.Model, wanted: constants.Wanted, *, dynamic: bool) -> None:
    """Splits fused products that are going to be quantized, in place.

    Args:
        model: with names on all of its nodes; the product has the fused node's.
        wanted: whether a node is going to be quantized.
        dynamic: whether an Attention that has a quantized form stays.
    """
    for node in list(graph_nodes.nodes(model)):
        if node.domain != graph_nodes.MICROSOFT or not wanted(node):
            continue
        if node.op_type == "FusedGemm":
            _split_gemm(node)
        elif node.op_type == "Attention" and not (dynamic and has_quantized_form(node)):
            _split_attention(model, node)


def _split_gemm(node: ir.Node) -> None:
    """``FusedGemm`` → ``Gemm`` and its activation."""
    activation = graph_nodes.attribute(node, "activation", "")
    others = {"activation_alpha", "activation_beta", "activation_gamma"} & set(node.attributes)
    if activation not in _PLAIN or others:
        return
    attributes = [value for name, value in node.attributes.items() if name != "activation"]
    product = ir.Node("", "Gemm", node.inputs, attributes, name=node.name)
    product.outputs[0].name = f"{node.outputs[0].name}_before"
    product.outputs[0].type, product.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
    applied = ir.node(activation, [product.outputs[0]], name=f"{node.name}_activation")
    graph_nodes.put(node, [product, applied])


def _split_attention(model: ir.Model, node: ir.Node) -> None:
    """``Attention(x, w, b, mask, bias)`` → ``MatMul``, ``Split`` and ``MultiHeadAttention``."""
    tensor = constants.weight(node)
    given = [*node.inputs, *[None] * 7][:7]
    if tensor is None or len(tensor.shape) != 2 or given[4] is not None or given[6] is not None:
        return
    if set(node.attributes) - {*_COMMON, "qkv_hidden_sizes"}:
        return
    if any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        return
    mask = given[3]
    if mask is not None and (mask.shape is None or len(mask.shape) not in (1, 2)):
        return
    if graph_nodes.opset(model) < 13:
        return  # where sizes of a Split are no input
    total = tensor.numpy().shape[1]
    sizes = list(graph_nodes.attribute(node, "qkv_hidden_sizes", [total // 3] * 3))
    name, result = node.name or "", node.outputs[0]
    product = ir.node("MatMul", [given[0], given[1]], name=name)
    product.outputs[0].name, product.outputs[0].type = f"{result.name}_qkv", result.type
    parts = constants.initializer(model, f"{name}_sizes", np.asarray(sizes, np.int64))
    split = ir.node(
        "Split", [product.outputs[0], parts], {"axis": -1}, num_outputs=3, name=f"{name}_split"
    )
    for value, part in zip(split.outputs, "qkv", strict=True):
        value.name, value.type = f"{result.name}_{part}", result.type
    heads = ir.Node(
        graph_nodes.MICROSOFT,
        "MultiHeadAttention",
        [*split.outputs, given[2], mask, given[5]],
        [value for key, value in node.attributes.items() if key in _COMMON],
        name=f"{name}_heads",
    )
    graph_nodes.put(node, [product, split, heads])

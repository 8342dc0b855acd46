"""Products of 16 and 64 bits in float32, which is the only one that quantizers know.

``DynamicQuantizeLinear`` takes float32 alone, and a quantizer that was given a model in float16
wrote files that no session loads. What is around a product keeps its type.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortrain.deploy.quantization import constants, graph_nodes

_FLOAT = ir.DataType.FLOAT
# Inputs that are not of the product's type: lengths of rows, masks, positions of rows.
_OTHERS = {"Attention": {3, 6}, "Gather": {1}, "LSTM": {4}}


def widen(model: ir.Model, wanted: constants.Wanted, kept: frozenset[ir.DataType]) -> None:
    """Lets products and tables that are going to be quantized have float32, in place.

    Args:
        model: after its preparation.
        wanted: whether a node is going to be quantized.
        kept: dtypes that stay.
    """
    casts: dict[tuple[int, int], ir.Value] = {}
    for node in list(graph_nodes.nodes(model)):
        if not wanted(node):
            continue
        index = constants.WEIGHTED.get(node.op_type, 0 if node.op_type == "Gather" else None)
        if index is None or len(node.inputs) <= index:
            continue
        tensor = constants.constant(node.inputs[index])
        if tensor is None or tensor.dtype not in constants.FLOATS - {_FLOAT} - kept:
            continue
        if node.op_type == "Gather" and not graph_nodes.standard(node, "Gather"):
            continue
        _widen(model, node, tensor.dtype, casts)


def _widen(
    model: ir.Model, node: ir.Node, dtype: ir.DataType, casts: dict[tuple[int, int], ir.Value]
) -> None:
    graph = node.graph
    assert graph is not None
    for place, value in enumerate(node.inputs):
        if value is None or place in _OTHERS.get(node.op_type, ()):
            continue
        if (known := constants.constant(value)) is not None:
            if known.dtype == dtype:
                array = known.numpy().astype(np.float32)
                wide = constants.initializer(model, f"{value.name}_wide", array)
                node.replace_input_with(place, wide)
            continue
        key = id(value), id(graph)
        if key not in casts:
            cast = ir.node("Cast", [value], {"to": _FLOAT}, name=f"{value.name}_wide_{len(casts)}")
            casts[key] = cast.outputs[0]
            cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(_FLOAT), value.shape
            producer = value.producer()
            if producer is not None and producer.graph is graph:
                graph.insert_after(producer, cast)
            else:
                graph.insert_before(next(iter(graph)), cast)
        node.replace_input_with(place, casts[key])
    for value in list(node.outputs):
        if not value.name or not (value.uses() or value.is_graph_output()):
            continue
        narrow = ir.node("Cast", [value], {"to": dtype}, name=f"{value.name}_narrow")
        made = narrow.outputs[0]
        made.type, made.shape = ir.TensorType(dtype), value.shape
        for use in list(value.uses()):
            if use.node is not narrow:
                use.node.replace_input_with(use.idx, made)
        owner = value.graph if value.is_graph_output() else None
        if owner is not None:
            places = [i for i, each in enumerate(owner.outputs) if each is value]
            name, value.name = value.name, f"{value.name}_wide"
            made.name = name
            for place in places:
                owner.outputs[place] = made
        value.type = ir.TensorType(_FLOAT)
        graph.insert_after(node, narrow)

"""Graphs of :mod:`ortrain.graph` appended to the model that blocks are stacked on."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx_ir as ir

from ortrain.errors import GraphError
from ortrain.graph.build import Builder
from ortrain.ondevice.making.base import Accessor, current, opset_of, values_of


def emit(make: Callable[[Builder, ir.Value], ir.Value], input_name: str, stem: str) -> str:
    """Appends what is made of a value.

    Args:
        make: emits into a graph whose input is the value; it may add inputs and initializers.
            Inputs that it adds become the model's, or are those of the model of that name.
        input_name: of the value.
        stem: what the names of new values begin with.

    Returns:
        The name of the result.

    Raises:
        GraphError: there is no such value, its dtype cannot be told, or an input that is added is
            another thing in the model.
    """
    accessor = current()
    (known,) = accessor.types([input_name])
    x = ir.serde.deserialize_value_info_proto(known, None)
    opset = opset_of(accessor.model)
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": opset})
    with Builder(graph, opset=opset, prefix=stem) as op:
        result = make(op, x)
    for value in graph.inputs[1:]:
        _add_input(accessor, value)
    initializers = list(graph.initializers.values())
    for value in (*initializers, *(value for node in graph for value in node.outputs)):
        value.name = accessor.unique_name(value.name or stem)
    base = accessor.model.graph
    for value in initializers:  # nodes, since whoever lists initializers looks for weights
        tensor = value.const_value
        assert tensor is not None
        constant = onnx.numpy_helper.from_array(tensor.numpy())
        base.node.append(onnx.helper.make_node("Constant", [], [value.name or ""], value=constant))
    for node in graph:
        node.name = accessor.unique_name(f"{stem}/{node.op_type}")
        node.metadata_props.clear()
        base.node.append(ir.serde.serialize_node(node))
    assert result.name is not None
    return result.name


def _add_input(accessor: Accessor, value: ir.Value) -> None:
    value.metadata_props.clear()
    proto, graph = ir.serde.serialize_value(value), accessor.model.graph
    if proto.name not in values_of(graph):
        graph.input.append(proto)
        return
    (there,) = accessor.types([proto.name])
    if there.type.tensor_type.elem_type != proto.type.tensor_type.elem_type:
        raise GraphError(
            f"the model has a value {proto.name!r} of another dtype",
            because=f"it is {_dtype(there)}, and {_dtype(proto)} is needed",
            help="give the target another name",
        )


def _dtype(value: onnx.ValueInfoProto) -> str:
    return str(onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type)).lower()

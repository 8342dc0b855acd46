"""Operators that are not ONNX's own, written into a file along with what they mean.

ONNX knows a function by its domain, its name and an overload, so that two nodes of one operator may
have bodies of their own: ours depend on dtypes and shapes. onnxruntime puts the functions in their
nodes' places, and a file with them runs wherever there is the plain onnxruntime; who reads the file
sees an operator whole, and below it what it is made of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ortrain.graph import shapes

# Domain → what replaces each of its nodes in a graph, by an opset, but those that ONNX has no body
# of; entered by whoever defines the domain's operators.
SPELLINGS: dict[str, Callable[[ir.Graph, int], object]] = {}

# A constant of more elements decides nothing about a body, and is not written a second time.
_FEW = 64


def with_functions(model: ir.Model) -> ir.Model:
    """The model, or a copy in which each node of a domain with spellings has a function.

    Nodes with the same body share it. What ONNX has no body of stays as it is.
    """
    if not any(node.domain in SPELLINGS for node in model.graph.all_nodes()):
        return model
    result = model.clone()
    without_functions(result)
    overloads: dict[tuple[str, str, bytes], str] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for node in result.graph.all_nodes():
        function = _function(node, result.opset_imports[""]) if node.domain in SPELLINGS else None
        if function is None:
            continue
        operator = node.domain, node.op_type
        key = *operator, ir.to_proto(function).SerializeToString()
        if key not in overloads:
            counts[operator] += 1
            overloads[key] = function.overload = str(counts[operator])
            result.functions[function.identifier()] = function
        node.overload = overloads[key]
    return result


def without_functions(model: ir.Model) -> None:
    """Takes from a model the functions that :func:`with_functions` makes, in place."""
    for identifier in [each for each in model.functions if each[0] in SPELLINGS]:
        del model.functions[identifier]
    for node in model.graph.all_nodes():
        if node.domain in SPELLINGS:
            node.overload = ""


def _function(node: ir.Node, opset: int) -> ir.Function | None:
    """The function of one node, without an overload; None where ONNX has no body of it."""
    graph = _alone(node, opset)
    SPELLINGS[node.domain](graph, opset)
    if any(each.domain in SPELLINGS for each in graph.all_nodes()):
        return None
    made = iter(list(graph.outputs))
    graph.outputs[:] = [
        next(made) if _is_read(value) else _unread(graph, value) for value in node.outputs
    ]
    _spell_constants(graph)
    for each in graph.all_nodes():
        graph.opset_imports.setdefault(each.domain, 1)
    formals = [ir.Attr(each.name, each.type, None) for each in node.attributes.values()]
    return ir.Function(node.domain, node.op_type, graph=graph, attributes=formals)


def _alone(node: ir.Node, opset: int) -> ir.Graph:
    """A graph of one node's like, from its inputs to those of its outputs that are read."""
    inputs = [_like(value, f"input_{i}") for i, value in enumerate(node.inputs)]
    graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": opset}, name=node.op_type)
    operands: list[ir.Value | None] = []
    for value, formal in zip(node.inputs, inputs, strict=True):
        known = shapes.constant(value)
        if known is not None and known.size <= _FEW:
            formal = _like(value, f"{formal.name}_known")
            formal.const_value = ir.tensor(known)
            graph.register_initializer(formal)
        operands.append(None if value is None else formal)
    attributes, count = node.attributes.values(), len(node.outputs)
    whole = ir.Node(node.domain, node.op_type, operands, attributes, num_outputs=count)
    graph.append(whole)
    for value, own in zip(node.outputs, whole.outputs, strict=True):
        shapes.assign(own, value.dtype, value.shape)
        if _is_read(value):
            graph.outputs.append(own)
    return graph


def _is_read(value: ir.Value) -> bool:
    return value.is_graph_output() or bool(value.uses())


def _like(value: ir.Value | None, name: str) -> ir.Value:
    result = ir.Value(name=name)
    if value is not None:
        shapes.assign(result, value.dtype, value.shape)
    return result


def _unread(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """Zeros for an output that nobody reads, which a body need not make."""
    sizes = np.array([d if isinstance(d, int) else 1 for d in shapes.dims(value) or ()], np.int64)
    zero = ir.tensor(np.zeros(1, (value.dtype or ir.DataType.FLOAT).numpy()))
    shape = _constant(ir.tensor(sizes))
    zeros = ir.Node("", "ConstantOfShape", shape.outputs, [ir.AttrTensor("value", zero)])
    graph.extend([shape, zeros])
    return zeros.outputs[0]


def _spell_constants(graph: ir.Graph) -> None:
    """A function has no initializers: those of its body become nodes."""
    replace = ir.convenience.replace_all_uses_with
    for name, value in list(graph.initializers.items()):
        del graph.initializers[name]
        if value.const_value is not None and (value.uses() or value.is_graph_output()):
            node = _constant(value.const_value)
            graph.insert_before(graph[0], node)
            replace(value, node.outputs[0], replace_graph_outputs=True)


def _constant(tensor: ir.TensorProtocol) -> ir.Node:
    return ir.Node("", "Constant", [], [ir.AttrTensor("value", tensor)])

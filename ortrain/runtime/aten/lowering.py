"""A program in the operators that PyTorch has kernels for.

Of the others, ortrain's own are replaced by their bodies, and so are those of ONNX whose schema
has one.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from ortrain.graph import shapes
from ortrain.graph.function_body import function_body
from ortrain.graph.indices import REFUSES, as_given
from ortrain.graph.rewire import take_place
from ortrain.ops import expand
from ortrain.passes.clean import clean, remove_dead
from ortrain.program import Program
from ortrain.runtime.aten.inside import learn_shapes
from ortrain.runtime.aten.narrowing import bodies_in_float32, leave_casts_to_kernels
from ortrain.runtime.aten.products import (
    fuse_layers,
    scale_in_products,
    turn_transposed_products,
    widen_in_products,
)
from ortrain.runtime.aten.table import find
from ortrain.runtime.aten.tables import add_rows


def lower(program: Program) -> Program:
    """Lowers a copy of the program."""
    result = program.clone()
    expand(result.graph, opset=result.opset, only=lambda node: find(node) is None)
    while True:  # a body may hold operators without a kernel in turn, and of any dtype
        bodies_in_float32(result, lambda node: _body(node, result.opset) is not None)
        if not inline(result):
            break
        shapes.infer_all(result.model)
    clean(result)
    while leave_casts_to_kernels(result):
        clean(result)
    turn_transposed_products(result)
    fuse_layers(result)
    widen_in_products(result)
    scale_in_products(result)
    add_rows(result)
    clean(result)
    if _shapes_are_missing(result.graph):
        shapes.infer_all(result.model)
        if learn_shapes(result.graph):  # of which more may follow
            shapes.infer_all(result.model)
            learn_shapes(result.graph)
    leave_refusals_to_kernels(result)
    result.import_domains()
    result.name_values()
    return result


def leave_refusals_to_kernels(program: Program) -> None:
    """Gives kernels that refuse negative indices by themselves the indices as they are."""
    for node in list(program.graph.all_nodes()):
        if node.op_type in ("Gather", "GatherElements", "ScatterElements") and not node.domain:
            given = as_given(node.inputs[1])
            if given is not None:
                node.replace_input_with(1, given)
                node.metadata_props[REFUSES] = "1"
    remove_dead(program.graph)


def inline(program: Program) -> int:
    """Replaces ONNX's operators without a kernel by their function bodies; returns how many."""
    found: list[tuple[ir.Node, ir.Function]] = []
    for node in program.graph.all_nodes():
        body = _body(node, program.opset)
        if body is not None:
            found.append((node, ir.serde.deserialize_function(body)))
    for number, (node, function) in enumerate(found):
        # One for each node, since the types of its inputs may decide about the body.
        node.domain, node.overload = _DOMAIN, str(number)
        function.domain, function.overload = _DOMAIN, str(number)
        function.opset_imports.clear()
        function.opset_imports.update({"": program.opset, _DOMAIN: 1})
        program.model.functions[function.identifier()] = function
        _guard_outputs(node)
    if found:
        InlinePass()(program.model)
    return len(found)


def _body(node: ir.Node, opset: int) -> onnx.FunctionProto | None:
    """The body that takes a node's place."""
    if node.domain or find(node) is not None:
        return None
    if any(a.type is ir.AttributeType.GRAPH for a in node.attributes.values()):
        return None  # the inliner takes no body that is given a graph
    body = function_body(node, opset)
    return body if body is not None and _makes_outputs(body, node) else None


_DOMAIN = "ortrain.body"


def _makes_outputs(body: onnx.FunctionProto, node: ir.Node) -> bool:
    """Leaves a function as many outputs as the node has; whether it makes those that are read."""
    del body.output[len(node.outputs) :]
    made = {name for inner in body.node for name in inner.output}
    for name, value in zip(body.output, node.outputs, strict=True):
        if name not in made:
            if value.uses() or value.is_graph_output():
                return False
            body.node.append(onnx.helper.make_node("Constant", [], [name], value_float=0.0))
    return True


def _guard_outputs(node: ir.Node) -> None:
    """Puts a copy behind each output of the graph, which then keeps its name and its role."""
    for value in node.outputs:
        if value.is_graph_output():
            copy = ir.Node("", "Identity", [None], num_outputs=1)
            copy.metadata_props.update(node.metadata_props)
            assert node.graph is not None
            node.graph.insert_after(node, copy)
            take_place(copy.outputs[0], value)
            copy.replace_input_with(0, value)


def _shapes_are_missing(graph: ir.Graph) -> bool:
    return any(
        value.shape is None or value.dtype is None
        for node in graph.all_nodes()
        for value in node.outputs
    )

"""A model in the form in which a quantizer finds all of its products.

Exporters write weights as transposed initializers, as ``Constant`` nodes, as one initializer that
several nodes read, in functions and in sub-graphs; quantizers look for initializers that a node
reads itself. What is done here changes no number that a node gives, and no name of a node.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from ortrain.deploy.quantization import constants, graph_nodes, names, products
from ortrain.graph import shapes


def prepare(model: ir.Model, *, gemm: bool, wanted: constants.Wanted, plain: bool = False) -> None:
    """Brings a model into the form that quantizers need, in place.

    Args:
        model: to be changed; weights that are mapped from a file stay so.
        gemm: whether Gemm and fused products become MatMul and what is around it.
        wanted: whether a node is going to be quantized.
        plain: whether a Gemm gets the form in which it is quantized as such.
    """
    if model.functions:
        common.InlinePass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    _name_nodes(model)
    common.NameFixPass()(model)
    names.set_apart(model)
    common.RemoveInitializersFromInputsPass()(model)
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    common.NameFixPass()(model)  # a constant of one body has a name that is a value's in another
    constants.fold(model, wanted)
    for node in list(graph_nodes.nodes(model)):
        if not wanted(node):
            continue
        if graph_nodes.standard(node, "Gemm") and (gemm or plain):
            products.split(model, node) if gemm else products.plain(model, node)
        elif node.op_type == "FusedMatMul" and node.domain == graph_nodes.MICROSOFT:
            products.split_fused(model, node)
    _separate(model, wanted)
    remove_unused(model)


def infer(model: ir.Model) -> None:
    """Adds the types and shapes of values, in place; weights of any size stay where they are."""
    shapes.ask_onnx(model, data_prop=True)
    if _type_own(model):  # and what follows from it
        shapes.ask_onnx(model, data_prop=True)


def remove_unused(model: ir.Model) -> None:
    """Removes nodes and initializers that nothing reads, in place."""
    common.RemoveUnusedNodesPass()(model)


def _name_nodes(model: ir.Model) -> None:
    """Gives nodes without a name one: those who choose nodes do it by name."""
    taken = {node.name for node in graph_nodes.nodes(model) if node.name}
    for index, node in enumerate(graph_nodes.nodes(model)):
        if not node.name:
            name = f"{node.op_type}_{index}"
            while name in taken:
                name += "_"
            taken.add(name)
            node.name = name


def _separate(model: ir.Model, wanted: constants.Wanted) -> None:
    """Gives each way of reading an initializer one of its own.

    A table that a Gather reads and a MatMul multiplies with has one scale for all, but the columns
    of a product may have a scale each: onnxruntime's quantizer took what it had made first.
    """
    for value in list(model.graph.initializers.values()):
        tensor = constants.constant(value)
        if tensor is None or tensor.dtype not in constants.FLOATS:
            continue
        kinds: dict[tuple[str, int, int], list[tuple[ir.Node, int]]] = {}
        for use in value.uses():
            node = use.node
            if wanted(node):
                how = graph_nodes.attribute(node, "transB", 0)
                if use.idx == 2 and node.op_type in ("Conv", "ConvTranspose", "Gemm"):
                    how = len(kinds)  # a bias, which has the scale of its product
                kinds.setdefault((node.op_type, use.idx, how), []).append((node, use.idx))
        if len(kinds) < 2:
            continue
        for (operator, index, how), readers in list(kinds.items())[1:]:
            name = f"{value.name}_of_{operator}_{index}_{how}"
            own = ir.Value(name=name, const_value=tensor, type=value.type, shape=value.shape)
            model.graph.register_initializer(own)
            for node, position in readers:
                node.replace_input_with(position, own)


def _type_own(model: ir.Model) -> bool:
    """Types of what onnxruntime's operators give, which ONNX's inference does not know.

    Those that a model has before it is quantized give what they read.
    """
    changed = False
    for node in graph_nodes.nodes(model):
        if node.domain in graph_nodes.STANDARD:
            continue
        kind = next((v.type for v in node.inputs if v is not None and v.type is not None), None)
        if kind is None or kind.dtype not in constants.FLOATS:
            continue
        if node.outputs[0].type is None:
            node.outputs[0].type = kind
            changed = True
    return changed

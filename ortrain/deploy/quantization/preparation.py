"""A model in the form in which a quantizer finds all of its products.

Exporters write weights as transposed initializers, as ``Constant`` nodes, as one initializer that
several nodes read, in functions and in sub-graphs; quantizers look for initializers that a node
reads itself. What is done here changes no number that a node gives, and no name of a node.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from ortrain.deploy.quantization import constants, graph_nodes, names


def prepare(model: ir.Model, *, gemm: bool, wanted: constants.Wanted) -> None:
    """Brings a model into the form that quantizers need, in place.

    Args:
        model: to be changed; weights that are mapped from a file stay so.
        gemm: whether Gemm and fused products become MatMul and what is around it.
        wanted: whether a node is going to be quantized.
    """
    if model.functions:
        common.InlinePass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    _name_nodes(model)
    common.NameFixPass()(model)
    names.set_apart(model)
    common.RemoveInitializersFromInputsPass()(model)
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    constants.fold(model, wanted)
    for node in list(graph_nodes.nodes(model)):
        if not wanted(node):
            continue
        if gemm and graph_nodes.standard(node, "Gemm"):
            _split_gemm(model, node)
        elif node.op_type == "FusedMatMul" and node.domain == graph_nodes.MICROSOFT:
            _split_fused(model, node)
    _separate(model, wanted)
    remove_unused(model)


def infer(model: ir.Model) -> None:
    """Adds the types and shapes of values, in place; weights of any size stay where they are."""
    inference = common.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)
    inference(model)
    if _type_own(model):  # and what follows from it
        inference(model)


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


def _split_gemm(model: ir.Model, node: ir.Node) -> None:
    """``Gemm(x, w, b)`` → ``Add(MatMul(x, alpha w'), beta b)``, where its weight is constant."""
    tensor = constants.constant(node.inputs[1])
    if tensor is None or graph_nodes.attribute(node, "transA", 0):
        return
    held = node.inputs[1]
    assert held is not None
    assert held.name is not None
    array, value = tensor.numpy(), held
    transposed = graph_nodes.attribute(node, "transB", 0)
    alpha = graph_nodes.attribute(node, "alpha", 1.0)
    if transposed or alpha != 1.0:
        array = array.T if transposed else array
        # The product with alpha in float32, as Gemm has it.
        array = array if alpha == 1.0 else (array * np.float32(alpha)).astype(array.dtype)
        value = constants.initializer(
            model, f"{held.name}_for_{'t' if transposed else 'n'}{alpha}", array
        )
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    beta = graph_nodes.attribute(node, "beta", 1.0)
    if bias is not None and beta != 1.0:
        if (known := constants.constant(bias)) is None:
            return
        scaled = (known.numpy() * np.float32(beta)).astype(known.numpy().dtype)
        bias = constants.initializer(model, f"{bias.name}_times_{beta}", scaled)
    _replace(node, node.inputs[0], value, bias)


def _split_fused(model: ir.Model, node: ir.Node) -> None:
    """``FusedMatMul`` with a constant weight → ``MatMul`` with the weight as it is meant."""
    tensor = constants.constant(node.inputs[1])
    if tensor is None or any(graph_nodes.attribute(node, n, 0) for n in ("transA", "transBatchA")):
        return
    if graph_nodes.attribute(node, "transBatchB", 0) or len(tensor.shape) < 2:
        return
    held = node.inputs[1]
    assert held is not None
    array, value = tensor.numpy(), held
    transposed = graph_nodes.attribute(node, "transB", 0)
    alpha = graph_nodes.attribute(node, "alpha", 1.0)
    if transposed or alpha != 1.0:
        array = array.swapaxes(-1, -2) if transposed else array
        array = array if alpha == 1.0 else (array * np.float32(alpha)).astype(array.dtype)
        value = constants.initializer(
            model, f"{held.name}_for_{'t' if transposed else 'n'}{alpha}", array
        )
    _replace(node, node.inputs[0], value, None)


def _replace(node: ir.Node, read: ir.Value | None, held: ir.Value, bias: ir.Value | None) -> None:
    """Puts a MatMul of the same name, with a bias behind it, in the place of a node."""
    result = node.outputs[0]
    product = ir.node("MatMul", [read, held], name=node.name)
    made = [product]
    last = product.outputs[0]
    last.type = result.type
    if bias is not None:
        last.name = f"{result.name}_product"
        last.shape = result.shape
        made.append(ir.node("Add", [last, bias], name=f"{node.name}_bias"))
        last = made[-1].outputs[0]
    graph_nodes.put(node, made)


def _separate(model: ir.Model, wanted: constants.Wanted) -> None:
    """Gives each way of reading an initializer one of its own.

    A table that a Gather reads and a MatMul multiplies with has one scale for all, but the columns
    of a product may have a scale each: onnxruntime's quantizer took what it had made first.
    """
    for value in list(model.graph.initializers.values()):
        tensor = constants.constant(value)
        if tensor is None or tensor.dtype not in constants.FLOATS:
            continue
        kinds: dict[tuple[str, int, bool], list[tuple[ir.Node, int]]] = {}
        for use in value.uses():
            node = use.node
            if wanted(node):
                kinds.setdefault((node.op_type, use.idx, True), []).append((node, use.idx))
        if len(kinds) < 2:
            continue
        for (operator, index, _), readers in list(kinds.items())[1:]:
            name = f"{value.name}_of_{operator}_{index}"
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

"""A model in the form in which a quantizer finds all of its products.

Exporters write weights as transposed initializers, as ``Constant`` nodes, as one initializer that
several nodes read, in functions and in sub-graphs; quantizers look for initializers that a node
reads itself. What is done here changes no number that a node gives, and no name of a node.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

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
_OF_MICROSOFT = {"Attention", "EmbedLayerNormalization"}
# Products with a weight, and which of their inputs it is.
WEIGHTED = {
    "Attention": 1,
    "Conv": 1,
    "ConvTranspose": 1,
    "FusedGemm": 1,
    "FusedMatMul": 1,
    "Gemm": 1,
    "LSTM": 1,
    "MatMul": 1,
}
FLOATS = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE}

# What may stand between an initializer and a product that reads it.
_FOLDED = ("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
# Of an initializer that has been made of another one: that one's name.
TRANSPOSED = "transposed_of"

Wanted = Callable[[ir.Node], bool]


def nodes(model: ir.Model) -> Iterator[ir.Node]:
    """All nodes of a model, those of sub-graphs too."""
    for graph in model.graphs():
        yield from graph


def standard(node: ir.Node, *operators: str) -> bool:
    """Whether a node is of the standard domain, and one of these operators."""
    return node.domain in STANDARD and node.op_type in operators


def constant(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of an initializer that a caller cannot replace; None for other values."""
    if value is None or value.const_value is None or not value.is_initializer():
        return None
    return None if value.is_graph_input() else value.const_value


def attribute(node: ir.Node, name: str, default: Any) -> Any:
    """The value of an attribute of a node."""
    found = node.attributes.get(name)
    return default if found is None or found.is_ref() else found.value


def weight(node: ir.Node) -> ir.TensorProtocol | None:
    """The constant floating-point weight of a product; None where the node has none."""
    index = WEIGHTED.get(node.op_type)
    domain = MICROSOFT if node.op_type in {*_OF_MICROSOFT, "FusedMatMul", "FusedGemm"} else ""
    if index is None or len(node.inputs) <= index or node.domain not in {domain, *_as(domain)}:
        return None
    tensor = constant(node.inputs[index])
    return tensor if tensor is not None and tensor.dtype in FLOATS else None


def products(model: ir.Model) -> list[ir.Node]:
    """The nodes that multiply with a constant floating-point weight."""
    return [node for node in nodes(model) if weight(node) is not None]


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
        and node.domain not in ((MICROSOFT,) if node.op_type in _OF_MICROSOFT else STANDARD)
    ]


def prepare(model: ir.Model, *, gemm: bool, wanted: Wanted) -> None:
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
    common.RemoveInitializersFromInputsPass()(model)
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    _fold(model, wanted)
    for node in list(nodes(model)):
        if not wanted(node):
            continue
        if gemm and standard(node, "Gemm"):
            _split_gemm(model, node)
        elif node.op_type == "FusedMatMul" and node.domain == MICROSOFT:
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


def _as(domain: str) -> tuple[str, ...]:
    return STANDARD if domain == "" else (domain,)


def _name_nodes(model: ir.Model) -> None:
    """Gives nodes without a name one: those who choose nodes do it by name."""
    taken = {node.name for node in nodes(model) if node.name}
    for index, node in enumerate(nodes(model)):
        if not node.name:
            name = f"{node.op_type}_{index}"
            while name in taken:
                name += "_"
            taken.add(name)
            node.name = name


def _fold(model: ir.Model, wanted: Wanted) -> None:
    """Computes what is between an initializer and a product that reads it.

    Nothing is folded that only other nodes read: a transposed copy of an embedding would double it.
    """
    for node in list(nodes(model)):
        index = WEIGHTED.get(node.op_type, 0 if node.op_type == "Gather" else None)
        if index is None or len(node.inputs) <= index or not wanted(node):
            continue
        value = node.inputs[index]
        if value is None or constant(value) is not None:
            continue
        if (array := _evaluated(value)) is not None:
            assert value.name is not None
            folded = initializer(model, f"{value.name}_folded", array)
            if (source := _only_transposed(value)) is not None:
                folded.meta[TRANSPOSED] = source
            node.replace_input_with(index, folded)


def _only_transposed(value: ir.Value) -> str | None:
    """The name of the matrix that a value is the transposed of; None where it is another thing."""
    node = value.producer()
    if node is None or not standard(node, "Transpose") or constant(node.inputs[0]) is None:
        return None
    source = node.inputs[0]
    assert source is not None
    return source.name if len(source.shape or ()) == 2 else None


def _evaluated(value: ir.Value | None) -> np.ndarray | None:
    """The array of a value that follows from initializers alone; views wherever possible."""
    if (tensor := constant(value)) is not None:
        return tensor.numpy()
    node = value.producer() if value is not None else None
    if node is None or len(node.outputs) != 1 or not node.inputs:
        return None
    if not standard(node, *_FOLDED):
        return None
    read = [_evaluated(each) for each in node.inputs]
    if any(each is None for each in read):
        return None
    array = read[0]
    assert array is not None
    if node.op_type == "Identity":
        return array
    if node.op_type == "Transpose":
        return array.transpose(attribute(node, "perm", None))
    if node.op_type == "Cast":
        return array.astype(ir.DataType(attribute(node, "to", 1)).numpy())
    if node.op_type == "Flatten":
        axis = attribute(node, "axis", 1)
        return array.reshape(int(np.prod(array.shape[:axis], dtype=np.int64)), -1)
    if len(read) < 2 or (axes := read[1]) is None:
        return None
    if node.op_type == "Reshape":
        if attribute(node, "allowzero", 0):
            return array.reshape(axes.tolist())
        sizes = [array.shape[i] if n == 0 else n for i, n in enumerate(axes.tolist())]
        return array.reshape(sizes)
    if node.op_type == "Squeeze":
        return array.squeeze(tuple(axes.tolist()))
    return np.expand_dims(array, tuple(axes.tolist()))


def initializer(model: ir.Model, name: str, array: np.ndarray) -> ir.Value:
    """An initializer of the main graph; the same one where there is one of the name."""
    there = model.graph.initializers.get(name)
    if there is not None:
        return there
    tensor = ir.Tensor(array, name=name)
    value = ir.Value(
        name=name,
        const_value=tensor,
        type=ir.TensorType(tensor.dtype),
        shape=ir.Shape(array.shape),
    )
    model.graph.register_initializer(value)
    return value


def _split_gemm(model: ir.Model, node: ir.Node) -> None:
    """``Gemm(x, w, b)`` → ``Add(MatMul(x, alpha w'), beta b)``, where its weight is constant."""
    tensor = constant(node.inputs[1])
    if tensor is None or attribute(node, "transA", 0):
        return
    held = node.inputs[1]
    assert held is not None
    assert held.name is not None
    array, value = tensor.numpy(), held
    transposed, alpha = attribute(node, "transB", 0), attribute(node, "alpha", 1.0)
    if transposed or alpha != 1.0:
        array = array.T if transposed else array
        # The product with alpha in float32, as Gemm has it.
        array = array if alpha == 1.0 else (array * np.float32(alpha)).astype(array.dtype)
        value = initializer(model, f"{held.name}_for_{'t' if transposed else 'n'}{alpha}", array)
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    beta = attribute(node, "beta", 1.0)
    if bias is not None and beta != 1.0:
        if (known := constant(bias)) is None:
            return
        scaled = (known.numpy() * np.float32(beta)).astype(known.numpy().dtype)
        bias = initializer(model, f"{bias.name}_times_{beta}", scaled)
    _replace(node, node.inputs[0], value, bias)


def _split_fused(model: ir.Model, node: ir.Node) -> None:
    """``FusedMatMul`` with a constant weight → ``MatMul`` with the weight as it is meant."""
    tensor = constant(node.inputs[1])
    if tensor is None or any(attribute(node, n, 0) for n in ("transA", "transBatchA")):
        return
    if attribute(node, "transBatchB", 0) or len(tensor.shape) < 2:
        return
    held = node.inputs[1]
    assert held is not None
    array, value = tensor.numpy(), held
    transposed, alpha = attribute(node, "transB", 0), attribute(node, "alpha", 1.0)
    if transposed or alpha != 1.0:
        array = array.swapaxes(-1, -2) if transposed else array
        array = array if alpha == 1.0 else (array * np.float32(alpha)).astype(array.dtype)
        value = initializer(model, f"{held.name}_for_{'t' if transposed else 'n'}{alpha}", array)
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
    put(node, made)


def put(node: ir.Node, made: list[ir.Node]) -> None:
    """Nodes in the place of one; the last one's result has its result's name, type and shape."""
    assert node.graph is not None
    ir.convenience.replace_nodes_and_values(
        node.graph, node, [node], made, [node.outputs[0]], [made[-1].outputs[0]]
    )


def _separate(model: ir.Model, wanted: Wanted) -> None:
    """Gives each way of reading an initializer one of its own.

    A table that a Gather reads and a MatMul multiplies with has one scale for all, but the columns
    of a product may have a scale each: onnxruntime's quantizer took what it had made first.
    """
    for value in list(model.graph.initializers.values()):
        tensor = constant(value)
        if tensor is None or tensor.dtype not in FLOATS:
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
    for node in nodes(model):
        if node.domain in STANDARD:
            continue
        kind = next((v.type for v in node.inputs if v is not None and v.type is not None), None)
        if kind is None or kind.dtype not in FLOATS:
            continue
        if node.outputs[0].type is None:
            node.outputs[0].type = kind
            changed = True
    return changed


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


def quantizable(model: ir.Model, *, static: bool) -> list[ir.Node]:
    """Nodes that have numbers of their own to quantize: products, tables, in static also others."""
    weighted = {id(node) for node in nodes(model) if _held(node)}
    return [node for node in nodes(model) if static or id(node) in weighted]


def _held(node: ir.Node) -> bool:
    """Whether the weight of a product, or the table of a Gather, follows from initializers."""
    index = WEIGHTED.get(node.op_type, 0 if node.op_type == "Gather" else None)
    if index is None or len(node.inputs) <= index:
        return False
    value = node.inputs[index]
    if value is None or not follows_from_constants(value):
        return False
    tensor = constant(value)
    kind = value.dtype if tensor is None else tensor.dtype
    return kind is None or kind in FLOATS


def follows_from_constants(value: ir.Value | None) -> bool:
    """Whether a value follows from initializers alone, as a transposed weight does."""
    if constant(value) is not None:
        return True
    node = value.producer() if value is not None else None
    if node is None or not standard(node, *_FOLDED):
        return False
    return all(follows_from_constants(each) for each in node.inputs)


def constants(model: ir.Model) -> list[str]:
    """Nodes that read initializers alone, or what other such nodes give."""
    known: set[int] = set()
    found = []
    for node in model.graph:
        if node.inputs and all(
            value is None or constant(value) is not None or id(value) in known
            for value in node.inputs
        ):
            known.update(id(value) for value in node.outputs)
            found.append(node.name or "")
    return found

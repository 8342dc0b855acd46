"""The constants of a graph: weights, what follows from initializers alone, and new initializers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ortrain.deploy.quantization import graph_nodes, names

Wanted = Callable[[ir.Node], bool]

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
# Of a model: the initializers that have been made, by the names that were asked for.
_MADE = "initializers that were made"


def constant(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of an initializer that a caller cannot replace; None for other values."""
    if value is None or value.const_value is None or not value.is_initializer():
        return None
    return None if value.is_graph_input() else value.const_value


def weight(node: ir.Node) -> ir.TensorProtocol | None:
    """The constant floating-point weight of a product; None where the node has none."""
    index = WEIGHTED.get(node.op_type)
    own = node.op_type in {*graph_nodes.OF_MICROSOFT, "FusedMatMul", "FusedGemm"}
    domains = (graph_nodes.MICROSOFT,) if own else graph_nodes.STANDARD
    if index is None or len(node.inputs) <= index or node.domain not in domains:
        return None
    tensor = constant(node.inputs[index])
    return tensor if tensor is not None and tensor.dtype in FLOATS else None


def products(model: ir.Model) -> list[ir.Node]:
    """The nodes that multiply with a constant floating-point weight."""
    return [node for node in graph_nodes.nodes(model) if weight(node) is not None]


def initializer(model: ir.Model, name: str, array: np.ndarray) -> ir.Value:
    """An initializer of the main graph, under a name that no other value has.

    The same one where this has made one of the name: names say what an initializer is made of.
    """
    made: dict[str, ir.Value] = model.meta.setdefault(_MADE, {})
    there = made.get(name)
    if there is not None and model.graph.initializers.get(there.name or "") is there:
        return there
    asked, name = name, names.unused(model, name)
    tensor = ir.Tensor(array, name=name)
    value = ir.Value(
        name=name,
        const_value=tensor,
        type=ir.TensorType(tensor.dtype),
        shape=ir.Shape(array.shape),
    )
    model.graph.register_initializer(value)
    made[asked] = value
    return value


def fold(model: ir.Model, wanted: Wanted) -> None:
    """Computes what is between an initializer and a product that reads it.

    Nothing is folded that only other nodes read: a transposed copy of an embedding would double it.
    """
    for node in list(graph_nodes.nodes(model)):
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
    if node is None or not graph_nodes.standard(node, "Transpose"):
        return None
    if constant(node.inputs[0]) is None:
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
    if not graph_nodes.standard(node, *_FOLDED):
        return None
    read = [_evaluated(each) for each in node.inputs]
    if any(each is None for each in read):
        return None
    array = read[0]
    assert array is not None
    if node.op_type == "Identity":
        return array
    if node.op_type == "Transpose":
        return array.transpose(graph_nodes.attribute(node, "perm", None))
    if node.op_type == "Cast":
        return array.astype(ir.DataType(graph_nodes.attribute(node, "to", 1)).numpy())
    if node.op_type == "Flatten":
        axis = graph_nodes.attribute(node, "axis", 1)
        return array.reshape(int(np.prod(array.shape[:axis], dtype=np.int64)), -1)
    if len(read) < 2 or (axes := read[1]) is None:
        return None
    if node.op_type == "Reshape":
        if graph_nodes.attribute(node, "allowzero", 0):
            return array.reshape(axes.tolist())
        sizes = [array.shape[i] if n == 0 else n for i, n in enumerate(axes.tolist())]
        return array.reshape(sizes)
    if node.op_type == "Squeeze":
        return array.squeeze(tuple(axes.tolist()))
    return np.expand_dims(array, tuple(axes.tolist()))


def quantizable(model: ir.Model, *, static: bool) -> list[ir.Node]:
    """Nodes that have numbers of their own to quantize: products, tables, in static also others."""
    weighted = {id(node) for node in graph_nodes.nodes(model) if _held(node)}
    return [node for node in graph_nodes.nodes(model) if static or id(node) in weighted]


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
    if node is None or not graph_nodes.standard(node, *_FOLDED):
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

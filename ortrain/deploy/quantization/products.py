"""``Gemm`` and fused products in forms of which onnxruntime's quantizers make what they mean.

They quantize a bias in the scale of the product of both factors: with an ``alpha`` it had another
one (0.87 of the answers' norm was error), and one that is no vector of the columns failed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ortrain.deploy.quantization import constants, graph_nodes


def split(model: ir.Model, node: ir.Node) -> None:
    """``Gemm(x, w, b)`` → ``Add(MatMul(x, alpha w'), beta b)``, in place; the product has its name.

    Where the weight is no constant, alpha stands behind the product.
    """
    made: list[ir.Node] = []
    left, alpha = node.inputs[0], graph_nodes.attribute(node, "alpha", 1.0)
    if graph_nodes.attribute(node, "transA", 0):
        left = _made(made, node, "Transpose", [left], "rows", perm=[1, 0])
    transposed = bool(graph_nodes.attribute(node, "transB", 0))
    right = _times(model, node.inputs[1], alpha, transposed=transposed)
    if right is not None:
        alpha = 1.0
    elif transposed:
        right = _made(made, node, "Transpose", [node.inputs[1]], "turned", perm=[1, 0])
    else:
        right = node.inputs[1]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is not None:
        bias = _scaled(model, made, node, bias, graph_nodes.attribute(node, "beta", 1.0))
    product = ir.node("MatMul", [left, right], name=node.name)
    made.append(product)
    last = product.outputs[0]
    last.type = node.outputs[0].type
    if alpha != 1.0:
        factor = _number(model, node, alpha)
        last = _made(made, node, "Mul", [last, factor], "alpha")
    if bias is not None:
        last.name = f"{node.outputs[0].name}_product"
        last.shape = node.outputs[0].shape
        _made(made, node, "Add", [last, bias], "bias")
    graph_nodes.put(node, made)


def plain(model: ir.Model, node: ir.Node) -> None:
    """A ``Gemm`` as it is quantized: no factors, and a bias that is a constant vector; in place.

    One that cannot be is split.
    """
    alpha, beta = (graph_nodes.attribute(node, name, 1.0) for name in ("alpha", "beta"))
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    weight = constants.constant(node.inputs[1])
    if weight is None and bias is None and not graph_nodes.attribute(node, "transA", 0):
        return  # the factor stands behind the product anyway
    known = constants.constant(bias)
    if (
        weight is None
        or graph_nodes.attribute(node, "transA", 0)
        or (bias is not None and (known is None or not _is_row(known.shape.numpy())))
    ):
        split(model, node)
        return
    if alpha != 1.0:
        scaled = _times(model, node.inputs[1], alpha, transposed=False)
        node.replace_input_with(1, scaled)
        node.attributes.pop("alpha")
    if known is None:
        return
    columns = weight.shape.numpy()[0 if graph_nodes.attribute(node, "transB", 0) else 1]
    if beta != 1.0 or known.shape.numpy() != (columns,):
        array = known.numpy() if beta == 1.0 else _product(known.numpy(), beta)
        row = np.ascontiguousarray(np.broadcast_to(array.reshape(-1), (columns,)))
        assert bias is not None
        name = f"{bias.name}_times_{beta}_of_{columns}"
        node.replace_input_with(2, constants.initializer(model, name, row))
        node.attributes.pop("beta", None)


def split_fused(model: ir.Model, node: ir.Node) -> None:
    """``FusedMatMul`` with a constant weight → ``MatMul`` with the weight as it is meant."""
    tensor = constants.constant(node.inputs[1])
    if tensor is None or any(graph_nodes.attribute(node, n, 0) for n in ("transA", "transBatchA")):
        return
    if graph_nodes.attribute(node, "transBatchB", 0) or len(tensor.shape) < 2:
        return
    transposed = bool(graph_nodes.attribute(node, "transB", 0))
    alpha = graph_nodes.attribute(node, "alpha", 1.0)
    value = _times(model, node.inputs[1], alpha, transposed=transposed)
    product = ir.node("MatMul", [node.inputs[0], value], name=node.name)
    product.outputs[0].type = node.outputs[0].type
    graph_nodes.put(node, [product])


def _times(
    model: ir.Model, value: ir.Value | None, alpha: float, *, transposed: bool
) -> ir.Value | None:
    """A constant matrix, transposed and with a factor as that is asked for; None of no constant."""
    tensor = constants.constant(value)
    if tensor is None or value is None:
        return None
    if not transposed and alpha == 1.0:
        return value
    array = tensor.numpy().swapaxes(-1, -2) if transposed else tensor.numpy()
    array = array if alpha == 1.0 else _product(array, alpha)
    name = f"{value.name}_for_{'t' if transposed else 'n'}{alpha}"
    return constants.initializer(model, name, array)


def _scaled(
    model: ir.Model, made: list[ir.Node], node: ir.Node, bias: ir.Value, beta: float
) -> ir.Value:
    if beta == 1.0:
        return bias
    if (known := constants.constant(bias)) is not None:
        name = f"{bias.name}_times_{beta}"
        return constants.initializer(model, name, _product(known.numpy(), beta))
    return _made(made, node, "Mul", [bias, _number(model, node, beta)], "beta")


def _product(array: np.ndarray, factor: float) -> np.ndarray:
    """In float32, as Gemm has it, or in float64."""
    wide = array if array.dtype == np.float64 else array.astype(np.float32)
    return np.asarray(wide * wide.dtype.type(factor)).astype(array.dtype)


def _number(model: ir.Model, node: ir.Node, number: float) -> ir.Value:
    kind = next((v.dtype for v in (*node.inputs, *node.outputs) if v is not None and v.dtype), None)
    dtype = (kind or ir.DataType.FLOAT).numpy()
    return constants.initializer(model, f"{node.name}_{number}", np.asarray(number, dtype))


def _made(
    made: list[ir.Node],
    node: ir.Node,
    operator: str,
    inputs: list[ir.Value | None],
    what: str,
    **given: object,
) -> ir.Value:
    """The result of one more node in the place of another one."""
    each = ir.node(operator, inputs, dict(given), name=f"{node.name}_{what}")  # type: ignore[arg-type]
    made.append(each)
    each.outputs[0].type = node.outputs[0].type
    return each.outputs[0]


def _is_row(shape: Sequence[int]) -> bool:
    """Whether a bias is a number, or a number for each column."""
    return len(shape) <= 2 and int(np.prod(shape[:-1], dtype=np.int64)) == 1

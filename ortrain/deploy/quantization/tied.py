"""Tables of words that are the output layer too: integers that both read, stored once.

A decoder's output layer multiplies with the transposed table of its words. Quantized each for
itself, both have a copy in the file, which made 0.33 of float32's size of GPT-2's eight bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from ortrain.deploy.quantization import constants, graph_nodes, preparation


def tables(model: ir.Model, wanted: constants.Wanted) -> dict[str, str]:
    """Nodes that read rows of such a table → the product's weight, which is the table transposed.

    Args:
        model: after its preparation.
        wanted: whether a node is going to be quantized.
    """
    products = {
        value.meta[constants.TRANSPOSED]: value.name or ""
        for value in model.graph.initializers.values()
        if constants.TRANSPOSED in value.meta
        and all(graph_nodes.standard(use.node, "MatMul") for use in value.uses())
        and any(wanted(use.node) for use in value.uses())
    }
    found = {}
    for node in graph_nodes.nodes(model):
        if not graph_nodes.standard(node, "Gather") or not wanted(node):
            continue
        table = node.inputs[0]
        if table is None or table.name not in products or table.dtype != ir.DataType.FLOAT:
            continue
        if graph_nodes.attribute(node, "axis", 0) == 0:
            found[node.name or ""] = products[table.name]
    return found


def share(model: ir.Model, found: Mapping[str, str]) -> None:
    """Lets nodes that read rows read those of the product's integers, in place.

    Each row has the scale of its column of the product; where the product has one scale for all, so
    has the table.

    Args:
        model: quantized, but for these nodes.
        found: of :func:`tables`.
    """
    made: dict[str, ir.Value] = {}
    for node in list(graph_nodes.nodes(model)):
        weight = found.get(node.name or "")
        if weight is None or not graph_nodes.standard(node, "Gather"):
            continue
        if weight not in made:
            made[weight] = _transposed(model, weight)
        _read_rows(model, node, weight, made[weight])
    preparation.remove_unused(model)


def _transposed(model: ir.Model, weight: str) -> ir.Value:
    """The product's integers by rows, in the place of those by columns."""
    held = model.graph.initializers[f"{weight}_quantized"]
    assert held.const_value is not None
    array = np.ascontiguousarray(held.const_value.numpy().T)
    rows = constants.initializer(model, f"{weight}_by_rows", array)
    # onnxruntime computes it once, when it loads the file.
    back = ir.node("Transpose", [rows], {"perm": [1, 0]}, name=f"{weight}_by_columns")
    columns = back.outputs[0]
    columns.name = f"{weight}_columns"
    columns.type, columns.shape = held.type, held.shape
    held.replace_all_uses_with(columns)
    model.graph.insert_before(next(iter(model.graph)), back)
    return rows


def _read_rows(model: ir.Model, node: ir.Node, weight: str, rows: ir.Value) -> None:
    """``(rows[i] - zero[i]) * scale[i]`` in the place of rows of the table."""
    numbers, name = node.inputs[1], node.name or ""
    to_float = {"to": ir.DataType.FLOAT}
    picked = ir.node("Gather", [rows, numbers], name=name)
    wide = ir.node("Cast", [picked.outputs[0]], to_float, name=f"{name}_wide")
    made, value = [picked, wide], wide.outputs[0]
    zero = model.graph.initializers[f"{weight}_zero_point"]
    scale = model.graph.initializers[f"{weight}_scale"]
    assert zero.const_value is not None
    zeros = zero.const_value.numpy()
    last = constants.initializer(model, "last_axis", np.array([-1]))
    for kind, held, needed in (("Sub", zero, zeros.any()), ("Mul", scale, True)):
        if not needed:
            continue
        operand = held
        if zeros.ndim:  # of each row its own
            own = ir.node("Gather", [held, numbers], name=f"{name}_{kind}_rows")
            made.append(own)
            operand = own.outputs[0]
        if kind == "Sub":
            cast = ir.node("Cast", [operand], to_float, name=f"{name}_zero_wide")
            made.append(cast)
            operand = cast.outputs[0]
        if zeros.ndim:
            column = ir.node("Unsqueeze", [operand, last], name=f"{name}_{kind}_column")
            made.append(column)
            operand = column.outputs[0]
        made.append(ir.node(kind, [value, operand], name=f"{name}_{kind}"))
        value = made[-1].outputs[0]
    for index, each in enumerate(made):
        each.outputs[0].name = f"{name}_of_rows_{index}"
    graph_nodes.put(node, made)

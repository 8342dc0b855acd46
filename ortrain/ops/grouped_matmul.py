"""``ortrain::GroupedMatMul``: each group of rows has a matrix of its own, as experts have."""

from __future__ import annotations

import itertools

import numpy as np
import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.ops.base import operator


def _types(node: ir.Node) -> None:
    rows, weight = shapes.dims(node.inputs[0]), shapes.dims(node.inputs[1])
    assert node.inputs[0] is not None
    shape = None if rows is None or weight is None else ir.Shape((rows[0], weight[2]))
    shapes.assign(node.outputs[0], node.inputs[0].dtype, shape)


@operator("GroupedMatMul", types=_types)
def grouped_matmul(op: Builder, input: ir.Value, weight: ir.Value, ends: ir.Value) -> ir.Value:
    """Rows from ``ends[e - 1]`` to ``ends[e]`` times ``weight[e]``, for each group e.

    Args:
        op: the builder.
        input: floating, [S, K]; rows of a group lie together.
        weight: [E, K, N].
        ends: int64 [E], ascending to S: where each group ends. A group may be empty.

    Returns:
        [S, N].
    """
    products = [
        op.MatMul(rows, matrix)
        for rows, matrix in zip(groups(op, input, weight, ends), matrices(op, weight), strict=True)
    ]
    result: ir.Value = products[0] if len(products) == 1 else op.Concat(*products, axis=0)
    return result


def groups(op: Builder, rows: ir.Value, weight: ir.Value, ends: ir.Value) -> list[ir.Value]:
    """The rows of each group."""
    bounds = [op.constant(np.array([0], np.int64))]
    bounds += [op.Slice(ends, [e], [e + 1], [0]) for e in range(count(weight))]
    return [op.Slice(rows, a, b, [0]) for a, b in itertools.pairwise(bounds)]


def matrices(op: Builder, weight: ir.Value) -> list[ir.Value]:
    """The matrix of each group."""
    return [op.Gather(weight, np.int64(e), axis=0) for e in range(count(weight))]


def count(weight: ir.Value) -> int:
    """The number of groups."""
    known = shapes.dims(weight)
    assert known is not None
    assert isinstance(known[0], int), "parameters have sizes"
    return known[0]

"""Indices that count from the start of an axis, and from nowhere else."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder

# Beyond any axis, and a product with the length of a row stays below 2**63.
BEYOND = 2**31 - 1


# Notes at a node that its kernel is to refuse negative indices by itself.
REFUSES = "ortrain.refuses"


def from_the_start(op: Builder, index: ir.Value) -> ir.Value:
    """The indices, of which negative ones become larger than any axis.

    ONNX counts a negative index from the end, where most operators of torch refuse it. So
    onnxruntime refuses it too.

    Args:
        op: the builder.
        index: of dtype int32 or int64.
    """
    if is_never_negative(index):
        return index
    dtype = np.int32 if index.dtype == ir.DataType.INT32 else np.int64
    result: ir.Value = op.Where(op.Less(index, dtype(0)), dtype(BEYOND), index)
    return result


def as_given(index: ir.Value | None) -> ir.Value | None:
    """What :func:`from_the_start` made an index of; None where it is none of these."""
    node = index.producer() if index is not None else None
    if node is None or node.op_type != "Where" or node.domain:
        return None
    condition, beyond, given = node.inputs
    known, test = shapes.constant(beyond), condition.producer() if condition is not None else None
    if known is None or known.ndim or known != BEYOND or test is None or test.op_type != "Less":
        return None
    limit = shapes.constant(test.inputs[1])
    return given if test.inputs[0] is given and limit is not None and not limit.any() else None


_INDICES = {"Shape", "Size", "NonZero", "ArgMax", "ArgMin"}
_MOVES = {
    "Squeeze", "Unsqueeze", "Gather", "Slice", "Identity", "Reshape", "Flatten", "Transpose",
    "Expand", "Tile", "Split", "GatherElements", "GatherND", "Compress", "ReduceMax", "ReduceMin",
}  # fmt: skip
_KEEPS = {"Add", "Mul", "Div", "Min", "Concat", "Sum"}


def is_never_negative(value: ir.Value | None, depth: int = 12) -> bool:
    """Whether whole numbers are known not to be negative, by what made them.

    Args:
        value: of an integer dtype.
        depth: of the nodes that are looked at.
    """
    known = shapes.constant(value)
    if known is not None:
        return bool((known >= 0).all())
    node = value.producer() if value is not None else None
    if node is None or node.domain or not depth:
        return False

    def holds(place: int) -> bool:
        return place < len(node.inputs) and is_never_negative(node.inputs[place], depth - 1)

    kind = node.op_type
    if kind in _INDICES:
        return True
    if kind in ("TopK", "MaxPool"):
        return node.outputs[1] is value
    if kind in _MOVES:
        return holds(0)
    if kind == "Cast":
        source = node.inputs[0].dtype if node.inputs[0] is not None else None
        return source is ir.DataType.BOOL or (source in _WHOLE and holds(0))
    if kind == "Range":
        return holds(0) and holds(2)
    if kind == "Where":
        return holds(1) and (as_given(value) is not None or holds(2))
    if kind == "BitwiseAnd":
        return holds(0) or holds(1)
    if kind == "Max":
        return any(map(holds, range(len(node.inputs))))
    if kind == "Mod":
        return holds(1) and ("fmod" not in node.attributes or holds(0))
    return kind in _KEEPS and all(map(holds, range(len(node.inputs))))


_WHOLE = {ir.DataType.INT32, ir.DataType.INT64}

"""``ortrain::Pack`` and ``ortrain::Unpack``: some positions of a batch of rows, one behind another.

The two are each other's adjoint: what one moves forward, the other moves back in the gradient.
"""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.ops.base import operator


def _packed(node: ir.Node) -> None:
    data, places = node.inputs[0], node.inputs[1]
    assert data is not None
    known, count = shapes.dims(data), shapes.dims(places)
    shape = None
    if known is not None:
        shape = ir.Shape((1, count[0] if count else None, *known[2:]))
    shapes.assign(node.outputs[0], data.dtype, shape)


def _unpacked(node: ir.Node) -> None:
    data, sizes = node.inputs[0], node.inputs[2]
    assert data is not None
    known, lead = shapes.dims(data), shapes.constant(sizes)
    shape = None
    if known is not None:
        first = (None, None) if lead is None else tuple(lead.tolist())
        shape = ir.Shape((*first, *known[2:]))
    shapes.assign(node.outputs[0], data.dtype, shape)


@operator("Pack", types=_packed)
def pack(op: Builder, data: ir.Value, places: ir.Value) -> ir.Value:
    """The elements of ``data`` [B, S, ...] at some places: [1, T, ...].

    Args:
        op: the builder.
        data: any dtype.
        places: int64 [T], each of 0 … B * S - 1 at most once: row times S plus position.
    """
    flat = op.Reshape(data, _with_rest(op, [op.constant([-1], ir.DataType.INT64)], data))
    flat.shape = _rows_of(data)
    result: ir.Value = op.Unsqueeze(op.Gather(flat, places, axis=0), [0])
    return result


@operator("Unpack", types=_unpacked)
def unpack(op: Builder, data: ir.Value, places: ir.Value, sizes: ir.Value) -> ir.Value:
    """``data`` [1, T, ...] at those places of a tensor [B, S, ...] that is zero elsewhere.

    Args:
        op: the builder.
        data: any dtype.
        places: int64 [T], as in Pack.
        sizes: int64 [2]: B and S.
    """
    assert data.dtype is not None
    count = op.ReduceProd(sizes, [0], keepdims=1)
    zeros = op.Expand(op.constant(0, data.dtype), _with_rest(op, [count], data))
    zeros.shape = _rows_of(data)
    filled = op.ScatterND(zeros, op.Unsqueeze(places, [-1]), op.Squeeze(data, [0]))
    result: ir.Value = op.Reshape(filled, _with_rest(op, [sizes], data))
    result.shape = ir.Shape([None, *filled.shape])
    return result


def sizes_of(op: Builder, value: ir.Value) -> ir.Value:
    """The first two sizes of a value, int64 [2]."""
    known = shapes.dims(value)
    if known is not None and all(isinstance(d, int) for d in known[:2]):
        return op.constant(list(known[:2]), ir.DataType.INT64)
    result: ir.Value = op.Shape(value, start=0, end=2)
    return result


def _rows_of(data: ir.Value) -> ir.Shape:
    """Of all positions of a batch, one behind another, as far as ``data`` tells."""
    known = shapes.dims(data)
    assert known is not None, "capture gives every value a rank"
    return ir.Shape([None, *known[2:]])


def _with_rest(op: Builder, lead: list[ir.Value], data: ir.Value) -> ir.Value:
    """These sizes, and behind them those of the axes of ``data`` from the third on."""
    known = shapes.dims(data)
    assert known is not None, "capture gives every value a rank"
    rest = known[2:]
    if rest and all(isinstance(d, int) for d in rest):
        lead = [*lead, op.constant(list(rest), ir.DataType.INT64)]
    elif rest:
        lead = [*lead, op.Shape(data, start=2)]
    result: ir.Value = lead[0] if len(lead) == 1 else op.Concat(*lead, axis=0)
    return result

"""What reductions count."""

from __future__ import annotations

import math

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder


def reduced_count(op: Builder, x: ir.Value, axes: ir.Value | None, y: ir.Value) -> ir.Value:
    """The number of elements that one element of a result was reduced from, in x's dtype.

    Args:
        op: the builder.
        x: what is reduced; its rank is known.
        axes: over which; None for all of them.
        y: the result, which tells where the axes are not known.
    """
    known, over = shapes.dims(x), shapes.constant(axes)
    assert known is not None
    assert x.dtype is not None
    if axes is None or over is not None:
        picked = range(len(known)) if over is None or over.size == 0 else over.tolist()
        counts = [d for d in (known[a] for a in picked) if isinstance(d, int)]
        if len(counts) == len(picked):
            return op.constant(math.prod(counts), x.dtype)
        sizes = op.Shape(x)
        if over is not None and over.size:
            sizes = op.Gather(sizes, axes)
        return op.cast(op.ReduceProd(sizes, keepdims=0), x.dtype)
    # In floating point: of an empty tensor the integer division would be one by zero.
    wide = ir.DataType.DOUBLE
    return op.cast(op.cast(op.Size(x), wide) / op.cast(op.Size(y), wide), x.dtype)

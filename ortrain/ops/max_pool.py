"""``ortrain::MaxPool``: maxima of windows, and where in its plane each of them lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.ops.base import operator


def _types(node: ir.Node) -> None:
    x = node.inputs[0]
    assert x is not None
    known = shapes.dims(x)
    shape = None if known is None else ir.Shape([*known[:2], *[None] * (len(known) - 2)])
    shapes.assign(node.outputs[0], x.dtype, shape)
    if len(node.outputs) > 1:
        shapes.assign(node.outputs[1], ir.DataType.INT64, shape)


@operator("MaxPool", outputs=("output", "places"), types=_types)
def max_pool(
    op: Builder,
    x: ir.Value,
    *,
    kernel_shape: Sequence[int],
    ceil_mode: int = 0,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> tuple[ir.Value, ir.Value]:
    """The maximum of each window, as ONNX's MaxPool.

    Args:
        op: the builder.
        x: [N, C, ...].
        kernel_shape: of the window.
        ceil_mode: 1 keeps a last window that hangs over the end.
        dilations: of the window.
        pads: the begins, then the ends.
        strides: of the window.

    Returns:
        The maxima, and int64 places: of each in the flattened plane [...] of its image and channel.
        ONNX's own indices count over the whole tensor.
    """
    window: dict[str, Any] = {"kernel_shape": kernel_shape, "ceil_mode": ceil_mode}
    given = {"dilations": dilations, "pads": pads, "strides": strides}
    window |= {name: value for name, value in given.items() if value is not None}
    maxima, indices = op.node("MaxPool", (x,), outputs=2, **window)
    return maxima, op.Mod(indices, plane(op, x))


def plane(op: Builder, x: ir.Value) -> ir.Value:
    """The number of elements of a plane of x, as an int64 scalar."""
    known = [d for d in (shapes.dims(x) or ())[2:] if isinstance(d, int)]
    if shapes.rank(x) == len(known) + 2:
        return op.constant(np.int64(math.prod(known)))
    size: ir.Value = op.ReduceProd(op.Shape(x, start=2), keepdims=0)
    return size

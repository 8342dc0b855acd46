"""``ortrain::Hardtanh``: a clip without gradient at its bounds, as of PyTorch's ``relu6``."""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph.build import Builder
from ortrain.ops.base import like_first, operator


def is_outside(op: Builder, x: ir.Value, low: float | ir.Value, high: float | ir.Value) -> ir.Value:
    """Where no gradient passes: at the bounds and beyond them, but not where x is no number."""
    beyond: ir.Value = op.Or(op.LessOrEqual(x, low), op.GreaterOrEqual(x, high))
    return beyond


@operator("Hardtanh", types=like_first)
def hardtanh(op: Builder, x: ir.Value, *, min_val: float = -1.0, max_val: float = 1.0) -> ir.Value:
    """``min(max(x, min_val), max_val)``; what is no number stays so.

    Args:
        op: the builder.
        x: floating-point.
        min_val: lower bound.
        max_val: upper bound, above the lower one.
    """
    clipped = op.Clip(x, min_val, max_val)
    result: ir.Value = op.Where(is_outside(op, x, min_val, max_val), clipped, x)
    return result

"""``ortrain::FakeQuantize``: numbers as integers of few bits would hold them, in floating point.

What training sees of a quantized model (Jacob et al. 2018, arXiv:1712.05877).
"""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph.build import Builder
from ortrain.ops.base import like_first, operator


@operator("FakeQuantize", types=like_first)
def fake_quantize(
    op: Builder, x: ir.Value, scale: ir.Value, zero: ir.Value, *, low: int, high: int
) -> ir.Value:
    """``scale * (clip(round(x / scale) + zero, low, high) - zero)``, halves to even.

    Args:
        op: the builder.
        x: floating, any shape.
        scale: of x's dtype, above 0, of a shape that broadcasts to x's.
        zero: whole numbers in x's dtype, likewise.
        low: the lowest integer.
        high: the highest.
    """
    held = op.Clip(whole(op, x, scale, zero), low, high)
    result: ir.Value = op.Mul(op.Sub(held, zero), scale)
    return result


def whole(op: Builder, x: ir.Value, scale: ir.Value, zero: ir.Value) -> ir.Value:
    """The integers of x before those out of range are cut off."""
    result: ir.Value = op.Add(op.Round(op.Div(x, scale)), zero)
    return result

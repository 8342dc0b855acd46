"""``ortrain::Silu``: ``x * sigmoid(x)`` whole, for executors with a kernel of its gradient."""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph.build import Builder
from ortrain.ops.base import like_first, operator


@operator("Silu", types=like_first)
def silu(op: Builder, x: ir.Value) -> ir.Value:
    """``x * sigmoid(x)``."""
    result: ir.Value = op.Mul(x, op.Sigmoid(x))
    return result

"""``ortrain::StopGradient``: the identity, through which no gradient flows (``Tensor.detach``)."""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph.build import Builder
from ortrain.ops.base import like_first, operator


@operator("StopGradient", types=like_first)
def stop_gradient(op: Builder, input: ir.Value) -> ir.Value:
    """Returns the input."""
    result: ir.Value = op.Identity(input)
    return result

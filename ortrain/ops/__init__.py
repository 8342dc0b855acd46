"""ortrain's own operators: composites that carry meaning through the stages.

One file each: the schema is a Python signature, the body is written with the graph builder. The
body is the operator's meaning, its fallback on any ONNX runtime, and its test oracle.
"""

from ortrain.extras import require

require("onnx", __name__)

from ortrain.ops import (
    attention,
    batch_norm,
    cross_entropy,
    dropout,
    embedding,
    fake_quantize,
    flash_attention,
    gradients,
    group_norm,
    grouped_matmul,
    hardtanh,
    kept,
    linear_cross_entropy,
    max_pool,
    narrow_attention,
    precise,
    random,
    silu,
    stop_gradient,
    tokens,
)
from ortrain.ops.base import DOMAIN, OPERATORS, Operator, expand, operator

__all__ = ["DOMAIN", "OPERATORS", "Operator", "expand", "operator"]

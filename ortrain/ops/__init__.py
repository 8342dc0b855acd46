"""ortrain's own operators: composites that carry meaning through the stages.

One file each: the schema is a Python signature, the body is written with the graph builder. The
body is the operator's meaning, its fallback on any ONNX runtime, and its test oracle.
"""

from ortrain.extras import require

require("onnx", __name__)

import onnx_ir as ir

from ortrain.graph.local_functions import SPELLINGS
from ortrain.ops import (
    attention,
    batch_norm,
    cross_entropy,
    custom_gradient,
    dropout,
    embedding,
    fake_quantize,
    flash_attention,
    gradients,
    group_norm,
    grouped_matmul,
    hardtanh,
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


def _spell(graph: ir.Graph, opset: int) -> None:
    """Replaces each operator by its body."""
    expand(graph, opset=opset, only=lambda n: n.op_type in OPERATORS)


SPELLINGS[DOMAIN] = _spell

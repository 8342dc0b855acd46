"""Where gradients may be infinite: behind what has a pole, as a square root has at zero.

PyTorch's backward of ``relu`` or ``clamp`` chooses between the gradient and zero, and so makes a
zero of an infinite gradient (``sqrt(relu(x))`` at zero). A product with a mask is faster and makes
no number of it. It is used where no gradient can be infinite.
"""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.walk import reads

_POLES = {"Sqrt", "Log", "Reciprocal", "Asin", "Acos", "Acosh", "Atanh", "ReduceLogSum"}
# They mix all elements of a row: what is no number in one of them is none in all.
_MIXING = {
    ("", name)
    for name in ("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "LSTM", "GRU", "RNN",
                 "Softmax", "LogSoftmax", "LayerNormalization", "GroupNormalization",
                 "InstanceNormalization", "RMSNormalization")
} | {
    ("ortrain", name)
    for name in ("Attention", "BatchNorm", "CrossEntropy", "FlashAttention", "GroupNorm",
                 "LinearCrossEntropy", "NarrowAttention")
}  # fmt: skip


def steep_values(graph: ir.Graph, outputs: list[ir.Value]) -> set[ir.Value]:
    """Values whose gradient may be infinite.

    Args:
        graph: the forward.
        outputs: those that receive a gradient from outside. One that is no scalar may be read by
            anything there.
    """
    steep = {value for value in outputs if shapes.rank(value) != 0}
    for node in reversed(graph):
        if (node.domain, node.op_type) in _MIXING:
            continue
        if _has_pole(node) or any(value in steep for value in node.outputs):
            steep.update(reads(node))
    return steep


def _has_pole(node: ir.Node) -> bool:
    if node.op_type == "Div":
        return shapes.constant(node.inputs[1]) is None
    if node.op_type == "Pow":
        exponent = shapes.constant(node.inputs[1])
        return exponent is None or bool((exponent < 1).any())
    return node.op_type in _POLES

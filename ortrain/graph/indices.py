"""Indices that count from the start of an axis, and from nowhere else."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortrain.graph.build import Builder


def from_the_start(op: Builder, index: ir.Value) -> ir.Value:
    """The indices, of which negative ones become larger than any axis.

    ONNX counts a negative index from the end, where torch's embeddings and losses refuse it. So
    onnxruntime refuses it too.

    Args:
        op: the builder.
        index: of dtype int32 or int64.
    """
    dtype = np.int32 if index.dtype == ir.DataType.INT32 else np.int64
    result: ir.Value = op.BitwiseAnd(index, dtype(np.iinfo(dtype).max))
    return result

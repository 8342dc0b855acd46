"""``ortrain::Attention``: scaled dot-product attention with dropout on the probabilities."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.ops.base import operator


def _types(node: ir.Node) -> None:
    query, value = node.inputs[0], node.inputs[2]
    assert query is not None
    q, v = shapes.dims(query), shapes.dims(value)
    shape = ir.Shape((*q[:-1], v[-1])) if q is not None and v is not None else None
    shapes.assign(node.outputs[0], query.dtype, shape)


@operator("Attention", types=_types)
def attention(
    op: Builder,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    mask: ir.Value | None = None,
    seed: ir.Value | None = None,
    *,
    scale: float,
    causal: int = 0,
    ratio: float = 0.0,
    stream: int = 0,
) -> ir.Value:
    """``softmax(scale * query keyᵀ + mask) value``, as ``torch…scaled_dot_product_attention``.

    Args:
        op: the builder.
        query: [..., L, E].
        key: [..., S, E].
        value: [..., S, F].
        mask: bool (true: take part) or floating (added), broadcastable to [..., L, S]. A query
            that it shuts out from every key (false, or minus infinity) yields zeros.
        seed: int64 scalar, needed where ``ratio`` is above 0.
        scale: factor of the products.
        causal: 1 lets query i see keys 0 … i only.
        ratio: dropout probability on the attention weights.
        stream: as in Dropout.

    Returns:
        [..., L, F].
    """
    assert query.dtype is not None
    length = shapes.rank(key)
    if length is None:
        raise AssertionError("capture gives every value a rank")
    order = [*range(length - 2), length - 1, length - 2]
    scores = op.Mul(op.MatMul(query, op.Transpose(key, perm=order)), scale)
    alive = None
    if causal:
        assert mask is None, "torch refuses a mask together with is_causal"
        scores = op.Add(scores, _bias(op, _causal(op, query, key), query.dtype))
    elif mask is not None:
        if mask.dtype == ir.DataType.BOOL:
            open_ = mask
            bias = _bias(op, mask, query.dtype)
        else:
            mask = op.cast(mask, query.dtype)
            open_ = op.Greater(mask, _lowest(query.dtype))
            bias = op.Where(open_, mask, op.constant(_lowest(query.dtype), query.dtype))
        scores = op.Add(scores, bias)
        alive = op.cast(open_, query.dtype)
        if shapes.rank(mask) != 0:
            alive = op.ReduceMax(alive, [-1], keepdims=1)
    weights = op.Softmax(scores, axis=-1)
    if ratio > 0:
        assert seed is not None
        weights = op.node(
            "Dropout", (weights, seed), domain="ortrain", ratio=float(ratio), stream=int(stream)
        )
    result: ir.Value = op.MatMul(weights, value)
    return result if alive is None else op.Mul(result, alive)


def _bias(op: Builder, mask: ir.Value, dtype: ir.DataType) -> ir.Value:
    """0 where the mask is true, else a finite stand-in for minus infinity.

    ``exp(score + lowest)`` is exactly zero, and a row that is shut out entirely stays finite, so
    that multiplying it by zero clears it.
    """
    lowest = op.constant(_lowest(dtype), dtype)
    result: ir.Value = op.Where(mask, op.constant(0.0, dtype), lowest)
    return result


def _lowest(dtype: ir.DataType) -> float:
    return -6e4 if dtype == ir.DataType.FLOAT16 else -1e30


def _causal(op: Builder, query: ir.Value, key: ir.Value) -> ir.Value:
    rows = op.Range(np.int64(0), op.Squeeze(op.dim(query, -2), [0]), np.int64(1))
    columns = op.Range(np.int64(0), op.Squeeze(op.dim(key, -2), [0]), np.int64(1))
    result: ir.Value = op.LessOrEqual(columns, op.Unsqueeze(rows, [1]))
    return result

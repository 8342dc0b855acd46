"""``ortrain::Attention``: scaled dot-product attention with dropout on the probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.graph.rounding import NARROW, WIDE
from ortrain.ops.base import DOMAIN, operator


def attention_type(node: ir.Node) -> None:
    """Typing: [..., L, F], with the leading axes of all operands."""
    query, value = node.inputs[0], node.inputs[2]
    assert query is not None
    q, v = shapes.dims(query), shapes.dims(value)
    shape = None
    if q is not None and v is not None:
        known = [(shapes.dims(value) or ())[:-2] for value in node.inputs[1:4]]
        lead = shapes.broadcast(q[:-2], *known) or ()
        own = (None,) * (len(lead) + 2 - len(q)) + q[:-2]
        named = [d if d is not None else o for d, o in zip(lead, own, strict=True)]
        shape = ir.Shape((*named, q[-2], v[-1]))
    shapes.assign(node.outputs[0], query.dtype, shape)


@operator("Attention", types=attention_type)
def attention(
    op: Builder,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    mask: ir.Value | None = None,
    seed: ir.Value | None = None,
    index: ir.Value | None = None,
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
        index: int64 [..., L], which number each row of the weights has for dropout, as there.
        scale: factor of the products.
        causal: 1 lets query i see keys 0 … i only.
        ratio: dropout probability on the attention weights.
        stream: as in Dropout.

    Returns:
        [..., L, F].
    """
    settings: dict[str, Any] = {
        "scale": scale, "causal": causal, "ratio": ratio, "stream": stream,
    }  # fmt: skip
    if query.dtype in NARROW:
        inputs = (query, key, value, mask, seed, index)
        output, _ = op.node("NarrowAttention", inputs, domain=DOMAIN, outputs=2, **settings)
        return output
    output, _ = attend(op, query, key, value, mask, seed, index, **settings)
    return output


def attend(
    op: Builder,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    mask: ir.Value | None,
    seed: ir.Value | None,
    index: ir.Value | None,
    *,
    scale: float,
    causal: int,
    ratio: float,
    stream: int,
) -> tuple[ir.Value, ir.Value]:
    """Attention, and its weights [..., L, S] as they are without dropout, in the query's dtype."""
    assert query.dtype is not None
    found, alive = scores(op, query, key, mask, scale=scale, causal=causal)
    weights = op.Softmax(found, axis=-1)
    used = dropped(op, weights, seed, index, ratio=ratio, stream=stream)
    return weighted(op, used, value, alive), op.cast(weights, query.dtype)


def weighted(op: Builder, weights: ir.Value, value: ir.Value, alive: ir.Value | None) -> ir.Value:
    """The values by their weights, in their own dtype; zeros for a query that sees no key."""
    assert value.dtype is not None
    output = op.cast(wide_product(op, weights, value), value.dtype)
    return output if alive is None else op.Mul(output, op.cast(alive, value.dtype))


def dropped(
    op: Builder,
    weights: ir.Value,
    seed: ir.Value | None,
    index: ir.Value | None,
    *,
    ratio: float,
    stream: int,
) -> ir.Value:
    """Weights, or their gradient, behind dropout."""
    if ratio <= 0:
        return weights
    assert seed is not None
    result: ir.Value = op.node(
        "Dropout", (weights, seed, index), domain=DOMAIN, ratio=float(ratio), stream=int(stream)
    )
    return result


def scores(
    op: Builder,
    query: ir.Value,
    key: ir.Value,
    mask: ir.Value | None,
    *,
    scale: float,
    causal: int,
) -> tuple[ir.Value, ir.Value | None]:
    """Of each query with each key, and 1 for each query that sees a key, else 0.

    Both of narrow tensors in float32. Where every query is known to see a key there is no second
    one.
    """
    dtype = inside(query)
    found = op.Mul(wide_product(op, query, op.transposed(key)), scale)
    alive = None
    if causal:
        assert mask is None, "torch refuses a mask together with is_causal"
        found = op.Add(found, _bias(op, _causal(op, query, key), dtype))
    elif mask is not None:
        bias, alive = masked(op, mask, query)
        found = op.Add(found, bias)
    return found, alive


def inside(query: ir.Value) -> ir.DataType:
    """What attention computes in between its products."""
    assert query.dtype is not None
    return WIDE if query.dtype in NARROW else query.dtype


def wide_product(op: Builder, left: ir.Value, right: ir.Value) -> ir.Value:
    """A product of matrices that is not rounded, in float32 of narrow ones."""
    dtype = inside(left)
    result: ir.Value = op.MatMul(op.cast(left, dtype), op.cast(right, dtype))
    return result


def masked(op: Builder, mask: ir.Value, query: ir.Value) -> tuple[ir.Value, ir.Value]:
    """What a mask adds to the scores, and 1 for each query that sees a key, else 0.

    A query that sees none would have a softmax of nothing but minus infinity. It gets a bias of
    zero instead, and the factor clears what comes of it, in the gradient too. All of this is done
    in the mask's own shape, which is mostly smaller than that of the scores. A mask of numbers is
    rounded to the query's dtype, in which PyTorch asks for it.
    """
    assert query.dtype is not None
    dtype = inside(query)
    if mask.dtype != ir.DataType.BOOL:
        mask = op.cast(op.cast(mask, query.dtype), dtype)
    shut = op.constant(-np.inf, dtype)
    if mask.dtype == ir.DataType.BOOL:
        seen, bias = mask, _bias(op, mask, dtype)
    else:
        seen, bias = op.Greater(mask, shut), mask
    alive = op.cast(seen, dtype)
    if shapes.rank(mask) != 0:
        alive = op.ReduceMax(alive, [-1], keepdims=1)
    return op.Where(op.cast(alive, ir.DataType.BOOL), bias, op.constant(0.0, dtype)), alive


def _bias(op: Builder, mask: ir.Value, dtype: ir.DataType) -> ir.Value:
    """0 where the mask is true, else minus infinity."""
    result: ir.Value = op.Where(mask, op.constant(0.0, dtype), op.constant(-np.inf, dtype))
    return result


def _causal(op: Builder, query: ir.Value, key: ir.Value) -> ir.Value:
    rows = op.Range(np.int64(0), op.Squeeze(op.dim(query, -2), [0]), np.int64(1))
    columns = op.Range(np.int64(0), op.Squeeze(op.dim(key, -2), [0]), np.int64(1))
    result: ir.Value = op.LessOrEqual(columns, op.Unsqueeze(rows, [1]))
    return result

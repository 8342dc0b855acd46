"""Heads of an attention: apart, as scores need them, and merged, as fused operators take them."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ortrain.deploy.optimization.fusions.layout import order
from ortrain.deploy.optimization.fusions.matching import made_by
from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.graph.shapes import Dim

HEADS_FIRST = [0, 2, 1, 3]


@dataclass(frozen=True)
class Attention:
    """An attention as it is found, with heads apart or, of three axes, folded into the batch.

    Attributes:
        query: [batch, heads, length, size], or [batch, length, size].
        key: [batch, heads, keys, size], or fewer heads where ``times`` is above 1.
        value: likewise, with a size of its own.
        times: how many heads of the query share one of key and value.
        scale: of the products.
        bias: what is added to the scores.
        cleared: whether rows without a key that they see are zeros, and not NaN.
        causal: whether a query sees the keys up to its own place alone.
        target: what all of this makes.
    """

    query: ir.Value
    key: ir.Value
    value: ir.Value
    times: int
    scale: float
    bias: ir.Value | None
    cleared: bool
    causal: bool
    target: ir.Value


def whole(dim: Dim) -> int:
    """A size that is known to be a number."""
    assert isinstance(dim, int)
    return dim


def merged(op: Builder, value: ir.Value) -> ir.Value:
    """[batch, heads, length, size] as [batch, length, heads * size]."""
    known = shapes.dims(value)
    assert known is not None
    apart = op.Transpose(value, perm=HEADS_FIRST)
    flat: ir.Value = op.Reshape(apart, [0, 0, whole(known[1]) * whole(known[3])])
    flat.shape = ir.Shape([known[0], known[2], whole(known[1]) * whole(known[3])])
    return flat


def splits_heads(value: ir.Value) -> bool:
    """Whether a value has just been taken apart, so that merging it again costs nothing."""
    node = made_by(value, "Transpose")
    return node is not None and order(node) == HEADS_FIRST


def apart(op: Builder, flat: ir.Value, heads: int) -> ir.Value:
    """[batch, length, heads * size] as [batch, heads, length, size]."""
    known = shapes.dims(flat)
    assert known is not None
    split = op.Reshape(flat, [0, 0, heads, whole(known[2]) // heads])
    split.shape = ir.Shape([known[0], known[1], heads, whole(known[2]) // heads])
    result: ir.Value = op.Transpose(split, perm=HEADS_FIRST)
    return result

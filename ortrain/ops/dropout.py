"""``ortrain::Dropout``: a mask from a counter-based hash, the same bits on every runtime.

An element at row i and column j (see :mod:`ortrain.ops.hash`) is kept where

    R(i) * C(j)  <  (1 - ratio) * 2^32

modulo 2^32, with ``R(i) = mix(i * W + a) | 1`` and ``C(j) = mix(j * W + b) | 1``. So the large
tensor costs one multiplication and one comparison, where a hash of each element's number costs
eight passes over memory; the high bits of the product of two odd numbers depend on all bits of
both, and the tests find keep rates and correlations (pairs, triples, rectangles) as those of
independent draws.

Nothing random is saved for the backward: the gradient draws the mask again.
"""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph.build import Builder
from ortrain.ops.base import like_first, operator
from ortrain.ops.hash import U32, Sizes, keys, mix, weyl


@operator("Dropout", types=like_first)
def dropout(
    op: Builder,
    input: ir.Value,
    seed: ir.Value,
    index: ir.Value | None = None,
    *,
    ratio: float,
    stream: int,
) -> ir.Value:
    """Zeroes each element with probability ``ratio`` and scales the rest by ``1/(1-ratio)``.

    Args:
        op: the builder.
        input: floating, any shape.
        seed: int64 scalar; one a step.
        index: int64, of the input's shape without its last axis: logical row of each row. Absent:
            the rows in order. With it, a pass may drop rows and keep the mask of the others.
        ratio: probability of a zero, in [0, 1].
        stream: number of this dropout in its program, so that two masks are independent.
    """
    if ratio <= 0:
        return input
    assert input.dtype is not None
    if ratio >= 1:
        zero: ir.Value = op.Mul(input, 0.0)
        return zero
    kept = keep(op, Sizes.of(input), seed, index, chance=1.0 - ratio, stream=stream)
    if kept.shape is None and input.shape is not None:
        kept.shape = input.shape
    result: ir.Value = op.Mul(op.Mul(input, op.cast(kept, input.dtype)), 1.0 / (1.0 - ratio))
    return result


def keep(
    op: Builder,
    sizes: Sizes,
    seed: ir.Value,
    index: ir.Value | None = None,
    *,
    chance: float,
    stream: int,
) -> ir.Value:
    """The bool mask of the kept elements.

    Args:
        op: the builder.
        sizes: of the mask.
        seed: int64 scalar.
        index: logical row of each row, as in Dropout.
        chance: that an element is kept, in [0, 1].
        stream: as in Dropout.
    """
    row_key, column_key = keys(op, seed, stream)
    if sizes.rank == 0:
        h = _odd(op, row_key)
    elif sizes.rank == 1 and index is None:
        h = _odd(op, weyl(op, sizes.columns(op), column_key))
    else:
        rows = sizes.rows(op) if index is None else op.cast(index, ir.DataType.UINT32)
        row = op.Unsqueeze(_odd(op, weyl(op, rows, row_key)), [-1])
        h = op.Mul(row, _odd(op, weyl(op, sizes.columns(op), column_key)))
    result: ir.Value = op.Less(h, U32(threshold(chance)))
    return result


def threshold(chance: float) -> int:
    """Below which an odd 32-bit number lies with this chance.

    To 24 bits, so that 1 - 0.1 in float64 and in float32, as an ONNX file has it, are one number.
    """
    return min(round(chance * 2**24) << 8, 2**32 - 1)


def _odd(op: Builder, h: ir.Value) -> ir.Value:
    result: ir.Value = op.BitwiseOr(mix(op, h), U32(1))
    return result

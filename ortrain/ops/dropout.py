"""``ortrain::Dropout``: a mask from a counter-based hash, the same bits on every runtime.

The element at logical position ``p`` (its index in the flattened tensor) is kept where

    h = p * M + a              (a, b: two 32-bit keys made from the seed and the stream)
    h = (h ^ (h >> 15)) * b
    h = (h ^ (h >> 13)) * N
    h < floor((1 - ratio) * 2^32)

in arithmetic modulo 2^32: a Weyl sequence mixed by two multiply-xorshift rounds, in the manner of
Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014). Integer arithmetic
alone defines it, so int32 with wrap-around and a masked shift gives the same bits as uint32.
Nothing random is saved for the backward: the gradient draws the same mask again.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.ops.base import like_first, operator

WEYL = 0x9E3779B1
ROUND = 0x85EBCA6B
U32 = np.uint32


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
        index: int64, broadcastable to the input: logical position of each element. Absent: the
            position in the flattened input. With it, a pass may drop rows and keep the mask.
        ratio: probability of a zero, in [0, 1].
        stream: number of this dropout in its program, so that two masks are independent.
    """
    if ratio <= 0:
        return input
    assert input.dtype is not None
    if ratio >= 1:
        zero: ir.Value = op.Mul(input, 0.0)
        return zero
    mask = op.cast(keep(op, input, seed, index, ratio=ratio, stream=stream), input.dtype)
    result: ir.Value = op.Mul(op.Mul(input, mask), 1.0 / (1.0 - ratio))
    return result


def keep(
    op: Builder,
    input: ir.Value,
    seed: ir.Value,
    index: ir.Value | None = None,
    *,
    ratio: float,
    stream: int,
) -> ir.Value:
    """The bool mask of the kept elements, of the input's shape."""
    first, second = _keys(op, seed, stream)
    if index is not None:
        h = op.Add(op.Mul(op.cast(index, ir.DataType.UINT32), U32(WEYL)), first)
    else:
        h = _weyl(op, input, first)
    h = op.Mul(_xorshift(op, h, 15), second)
    h = op.Mul(_xorshift(op, h, 13), U32(ROUND))
    threshold = min(int((1.0 - ratio) * 2**32), 2**32 - 1)
    result: ir.Value = op.Less(h, U32(threshold))
    if result.shape is None and input.shape is not None:
        result.shape = input.shape
    return result


def _weyl(op: Builder, input: ir.Value, key: ir.Value) -> ir.Value:
    """``position * WEYL + key`` of the input's shape.

    Spelled as row + column, so that the large tensor costs one broadcast addition.
    """
    length = shapes.rank(input)
    if length == 0:
        return key
    if length is None:
        flat = op.Mul(_range(op, op.Size(input)), U32(WEYL))
        return op.Reshape(op.Add(flat, key), op.shape(input))
    if length == 1:
        return op.Add(op.Mul(_range(op, op.dim(input, 0)), U32(WEYL)), key)
    shape = op.shape(input)
    width = op.dim(input, -1)
    known = shapes.static(input)
    rows_shape: ir.Value
    if known is not None:
        rows = op.constant(np.array([int(np.prod(known[:-1]))], np.int64))
        rows_shape = op.constant(np.array([*known[:-1], 1], np.int64))
    else:
        rows = op.Div(op.Size(input), width)
        lead = op.Slice(shape, [0], [length - 1])
        rows_shape = op.Concat(lead, [1], axis=0)
    stride = op.Mul(op.cast(width, ir.DataType.UINT32), U32(WEYL))
    row = op.Add(op.Mul(_range(op, rows), stride), key)
    column = op.Mul(_range(op, width), U32(WEYL))
    return op.Add(op.Reshape(row, rows_shape), column)


def _range(op: Builder, count: ir.Value) -> ir.Value:
    """``0 … count-1`` as uint32."""
    if count.shape is None or len(count.shape):
        count = op.Reshape(count, op.constant(np.array([], np.int64)))
    return op.cast(op.Range(np.int64(0), count, np.int64(1)), ir.DataType.UINT32)


def _xorshift(op: Builder, h: ir.Value, bits: int) -> ir.Value:
    result: ir.Value = op.BitwiseXor(h, op.BitShift(h, U32(bits), direction="RIGHT"))
    return result


def _keys(op: Builder, seed: ir.Value, stream: int) -> tuple[ir.Value, ir.Value]:
    """Two 32-bit keys, the second odd, from the 64-bit seed and the stream."""
    salt = (stream * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & (2**64 - 1)
    mask = np.int64(0xFFFFFFFF)
    low = op.cast(op.BitwiseAnd(seed, mask), ir.DataType.UINT32)
    high = op.cast(op.BitwiseAnd(op.Div(seed, np.int64(2**32)), mask), ir.DataType.UINT32)

    def mix(h: ir.Value) -> ir.Value:
        h = op.Mul(_xorshift(op, h, 16), U32(0x7FEB352D))
        h = op.Mul(_xorshift(op, h, 15), U32(0x846CA68B))
        return _xorshift(op, h, 16)

    first = mix(op.BitwiseXor(low, U32(salt & 0xFFFFFFFF)))
    second = mix(op.BitwiseXor(op.Add(high, first), U32(salt >> 32)))
    return first, op.BitwiseOr(second, U32(1))

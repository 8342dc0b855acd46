"""``ortrain::Dropout``: a mask from a counter-based hash, the same bits on every runtime.

An element has a logical position: its row (the index over all axes but the last, flattened) and its
column. Rows and columns get a well mixed odd 32-bit number each, and the element is kept where

    R(row) * C(column)  <  floor((1 - ratio) * 2^32)

modulo 2^32. ``R(i) = mix(i * W + a) | 1`` and ``C(i) = mix(i * W + b) | 1`` with two keys a, b that
are a hash of the seed xor a constant of the stream, and ``mix`` the multiply-xorshift finalizer
"lowbias32" of Chris Wellons. So the large tensor costs one multiplication and one comparison, where
a hash of each element's number costs eight passes over memory; the high bits of the product of two
odd numbers depend on all bits of both, and the tests find keep rates and correlations (pairs,
triples, rectangles) as those of independent draws.

Integer arithmetic alone defines the mask, so int32 with wrap-around and a masked shift gives the
same bits as uint32. Nothing random is saved for the backward: the gradient draws the mask again.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.ops.base import like_first, operator

WEYL = 0x9E3779B1
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
    row_key, column_key = _keys(op, seed, stream)
    length = shapes.rank(input)
    assert length is not None, "capture gives every value a rank"
    if length == 0:
        h = _odd(op, row_key)
    elif length == 1 and index is None:
        h = _odd(op, _weyl(op, _range(op, op.dim(input, 0)), column_key))
    else:
        rows = _rows(op, input) if index is None else op.cast(index, ir.DataType.UINT32)
        row = op.Unsqueeze(_odd(op, _weyl(op, rows, row_key)), [-1])
        h = op.Mul(row, _odd(op, _weyl(op, _range(op, op.dim(input, -1)), column_key)))
    threshold = min(int((1.0 - ratio) * 2**32), 2**32 - 1)
    result: ir.Value = op.Less(h, U32(threshold))
    if result.shape is None and input.shape is not None:
        result.shape = input.shape
    return result


def _weyl(op: Builder, position: ir.Value, key: ir.Value) -> ir.Value:
    result: ir.Value = op.Add(op.Mul(position, U32(WEYL)), key)
    return result


def _odd(op: Builder, h: ir.Value) -> ir.Value:
    result: ir.Value = op.BitwiseOr(_mix(op, h), U32(1))
    return result


def _rows(op: Builder, input: ir.Value) -> ir.Value:
    """``0 … rows-1`` as uint32, in the input's shape without its last axis."""
    length = shapes.rank(input)
    assert length is not None
    known = shapes.static(input)
    if known is not None:
        count = op.constant(np.array([int(np.prod(known[:-1]))], np.int64))
        return op.Reshape(_range(op, count), known[:-1])
    lead = op.Shape(input, start=0, end=length - 1)
    count = op.dim(input, 0) if length == 2 else op.ReduceProd(lead, keepdims=1)
    rows = _range(op, count)
    return rows if length == 2 else op.Reshape(rows, lead)


def _range(op: Builder, count: ir.Value) -> ir.Value:
    """``0 … count-1`` as uint32."""
    if count.shape is None or len(count.shape):
        count = op.Reshape(count, op.constant(np.array([], np.int64)))
    return op.cast(op.Range(np.int64(0), count, np.int64(1)), ir.DataType.UINT32)


def _mix(op: Builder, h: ir.Value) -> ir.Value:
    """The finalizer lowbias32: every bit of the result depends on every bit of ``h``."""
    h = op.Mul(_xorshift(op, h, 16), U32(0x7FEB352D))
    h = op.Mul(_xorshift(op, h, 15), U32(0x846CA68B))
    return _xorshift(op, h, 16)


def _xorshift(op: Builder, h: ir.Value, bits: int) -> ir.Value:
    result: ir.Value = op.BitwiseXor(h, op.BitShift(h, U32(bits), direction="RIGHT"))
    return result


def _keys(op: Builder, seed: ir.Value, stream: int) -> tuple[ir.Value, ir.Value]:
    """Two 32-bit keys, for rows and columns, from the 64-bit seed and the stream.

    The seed is mixed in the same way for every stream, so that a program does it once. Streams then
    differ by constants, and the mixing of rows and columns keeps their masks apart.
    """
    salt = _salt(stream)
    mask = np.int64(0xFFFFFFFF)
    low = op.cast(op.BitwiseAnd(seed, mask), ir.DataType.UINT32)
    high = op.cast(op.BitwiseAnd(op.Div(seed, np.int64(2**32)), mask), ir.DataType.UINT32)
    first = _mix(op, low)
    second = _mix(op, op.Add(high, first))
    return op.BitwiseXor(first, U32(salt & 0xFFFFFFFF)), op.BitwiseXor(second, U32(salt >> 32))


def kept(shape: tuple[int, ...], seed: int, stream: int, ratio: float) -> np.ndarray:
    """The mask of :func:`keep` in numpy, with the same bits.

    Args:
        shape: of the input, and of the result.
        seed: of the step, 0 … 2^63 - 1.
        stream: as in :func:`dropout`.
        ratio: as in :func:`dropout`; rounded to float32, as an attribute of a node is.
    """
    salt = _salt(stream)
    first = _mixed(np.array([seed & 0xFFFFFFFF], U32))
    second = _mixed(np.array([seed >> 32], U32) + first)
    row_key, column_key = first ^ U32(salt & 0xFFFFFFFF), second ^ U32(salt >> 32)
    rows = int(np.prod(shape[:-1]))
    row = _mixed(np.arange(rows, dtype=U32) * U32(WEYL) + row_key) | U32(1)
    column = np.arange(shape[-1] if shape else 1, dtype=U32) * U32(WEYL) + column_key
    column = _mixed(column) | U32(1)
    h = row if not shape else column if len(shape) == 1 else np.multiply.outer(row, column)
    threshold = min(int((1.0 - float(np.float32(ratio))) * 2**32), 2**32 - 1)
    result: np.ndarray = (h < U32(threshold)).reshape(shape)
    return result


def _mixed(h: np.ndarray) -> np.ndarray:
    h = (h ^ (h >> U32(16))) * U32(0x7FEB352D)
    h = (h ^ (h >> U32(15))) * U32(0x846CA68B)
    return h ^ (h >> U32(16))


def _salt(stream: int) -> int:
    return (stream * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & (2**64 - 1)

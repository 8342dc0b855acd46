"""The counter-based hash that all random numbers of a program come from.

An element has a logical position: its row (the index over all axes but the last, flattened) and its
column. Rows and columns get a well mixed 32-bit number each, ``mix(i * W + a)`` and
``mix(j * W + b)`` modulo 2^32, with two keys a, b that are a hash of the seed plus the number of
the stream times a constant. So stream 3 + i of a seed is stream i of another (:func:`advanced`),
and graphs that follow one another in a call draw what one graph of both would. ``mix`` is the
multiply-xorshift finalizer "lowbias32" of Chris Wellons. What an element draws is computed from
these two numbers, by an operator of its own: see ``Dropout`` and ``Random…``.

Integer arithmetic alone, so that every runtime has the same bits; int32 with wrap-around and a
masked shift gives the same as uint32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder

WEYL = 0x9E3779B1
U32 = np.uint32


@dataclass(frozen=True)
class Sizes:
    """The sizes of a tensor that numbers are drawn for.

    Attributes:
        rank: number of axes.
        known: the sizes where all are known.
        like: a tensor of these sizes; or else
        shape: the sizes as an int64 vector.
    """

    rank: int
    known: list[int] | None
    like: ir.Value | None = None
    shape: ir.Value | None = None

    @classmethod
    def of(cls, like: ir.Value) -> Sizes:
        """The sizes of a tensor."""
        length = shapes.rank(like)
        assert length is not None, "capture gives every value a rank"
        return cls(length, shapes.static(like), like=like)

    @classmethod
    def given(cls, shape: ir.Value) -> Sizes:
        """The sizes in an int64 vector."""
        known, length = shapes.constant(shape), shapes.dims(shape)
        assert length is not None, "capture gives every value a rank"
        assert isinstance(length[0], int), "a tensor's number of axes is known"
        return cls(length[0], None if known is None else known.tolist(), shape=shape)

    def lead(self, op: Builder) -> ir.Value:
        """All sizes but the last, as an int64 vector."""
        if self.known is not None:
            return op.constant(np.array(self.known[:-1], np.int64))
        if self.like is not None:
            return op.Shape(self.like, start=0, end=self.rank - 1)
        return op.Slice(self.shape, [0], [self.rank - 1], [0])

    def axis(self, op: Builder, axis: int) -> ir.Value:
        """One size, as an int64 vector of one element."""
        if self.known is not None:
            return op.constant(np.array([self.known[axis]], np.int64))
        if self.like is not None:
            return op.dim(self.like, axis)
        return op.Gather(self.shape, [axis % self.rank])

    def rows(self, op: Builder) -> ir.Value:
        """``0 … rows-1`` as uint32, in the shape without its last axis."""
        if self.known is not None:
            count = op.constant(np.array([int(np.prod(self.known[:-1]))], np.int64))
            return op.Reshape(counted(op, count), self.lead(op), allowzero=int(0 in self.known))
        if self.rank == 2:
            return counted(op, self.axis(op, 0))
        lead = self.lead(op)
        return op.Reshape(counted(op, op.ReduceProd(lead, keepdims=1)), lead, allowzero=1)

    def columns(self, op: Builder) -> ir.Value:
        """``0 … columns-1`` as uint32."""
        return counted(op, self.axis(op, -1))


def counted(op: Builder, count: ir.Value) -> ir.Value:
    """``0 … count-1`` as uint32."""
    if count.shape is None or len(count.shape):
        count = op.Reshape(count, op.constant(np.array([], np.int64)))
    return op.cast(op.Range(np.int64(0), count, np.int64(1)), ir.DataType.UINT32)


def weyl(op: Builder, position: ir.Value, key: ir.Value) -> ir.Value:
    """``position * W + key``: what is mixed."""
    result: ir.Value = op.Add(op.Mul(position, U32(WEYL)), key)
    return result


def mix(op: Builder, h: ir.Value) -> ir.Value:
    """The finalizer lowbias32: every bit of the result depends on every bit of ``h``."""
    h = op.Mul(_xorshift(op, h, 16), U32(0x7FEB352D))
    h = op.Mul(_xorshift(op, h, 15), U32(0x846CA68B))
    return _xorshift(op, h, 16)


def _xorshift(op: Builder, h: ir.Value, bits: int) -> ir.Value:
    result: ir.Value = op.BitwiseXor(h, op.BitShift(h, U32(bits), direction="RIGHT"))
    return result


def keys(op: Builder, seed: ir.Value, stream: int) -> tuple[ir.Value, ir.Value]:
    """Two 32-bit keys, for rows and columns, from the 64-bit seed and the stream.

    The seed is mixed in the same way for every stream, so that a program does it once. Streams then
    differ by constants, and the mixing of rows and columns keeps their numbers apart.
    """
    bits = op.cast(seed, ir.DataType.UINT64)
    low = op.cast(op.BitwiseAnd(bits, np.uint64(0xFFFFFFFF)), ir.DataType.UINT32)
    high = op.cast(op.BitShift(bits, np.uint64(32), direction="RIGHT"), ir.DataType.UINT32)
    first = mix(op, low)
    second = mix(op, op.Add(high, first))
    row, column = salts_of(stream)
    return op.Add(first, U32(row)), op.Add(second, U32(column))


# By stream in the keys of rows and of columns, and those of stream 0: odd, and unlike W.
_STREAM = (0x85EBCA6B, 0xC2B2AE35)
_FIRST = (0x32D192ED, 0xD1B54A32)


def salts_of(stream: int) -> tuple[int, int]:
    """What a stream adds to the keys of rows and columns, modulo 2^32."""
    row, column = ((stream * by + first) % 2**32 for by, first in zip(_STREAM, _FIRST, strict=True))
    return row, column


def halves_of(seed: int) -> tuple[int, int]:
    """What all streams share of their keys, modulo 2^32."""
    first = mixed(seed % 2**32)
    return first, mixed(((seed >> 32) + first) % 2**32)


def advanced(seed: int, streams: int) -> int:
    """The seed whose stream i is stream ``streams + i`` of another one; int64 as that."""
    keys = zip(halves_of(seed), _STREAM, strict=True)
    first, second = ((half + streams * by) % 2**32 for half, by in keys)
    found = (unmixed(second) - first) % 2**32 << 32 | unmixed(first)
    return found - 2**64 if found >= 2**63 else found


def mixed(h: int) -> int:
    """``mix`` of a whole number below 2^32."""
    h = (h ^ h >> 16) * 0x7FEB352D % 2**32
    h = (h ^ h >> 15) * 0x846CA68B % 2**32
    return h ^ h >> 16


def unmixed(h: int) -> int:
    """What :func:`mixed` makes a number of."""
    h = (h ^ h >> 16) * pow(0x846CA68B, -1, 2**32) % 2**32
    h = (h ^ h >> 15 ^ h >> 30) * pow(0x7FEB352D, -1, 2**32) % 2**32
    return h ^ h >> 16

"""Unsigned numbers of 16, 32 and 64 bits, which a function holds as signed ones of the same bits.

Sums, differences, products, left shifts and what is done bit by bit are the same for both.
"""

from __future__ import annotations

import onnx_ir as ir

from ortrain.runtime.aten.lines import Raw


def ordered(t, x):
    """Signed numbers in the order of the unsigned ones, and back: the top bit is turned."""
    result = t.bitwise_xor(x, -(2 ** (x.dtype.bitwidth - 1)))
    result.dtype = x.dtype
    return result


def turned(t, x):
    """The same; a number where it is a constant."""
    return ordered(t, x) if x.scalar is None else x.scalar ^ -(2 ** (x.dtype.bitwidth - 1))


def valued(x):
    """A tensor of PyTorch's unsigned dtype, which has hardly an operator but conversions."""
    result = x.view(Raw(f"torch.uint{x.dtype.bitwidth}"))
    result.dims = x.dims
    return result


def widened(x):
    """The same numbers in a signed dtype that has room for them; not of 64 bits."""
    assert x.dtype is not ir.DataType.UINT64, "no signed dtype has room for uint64"
    return valued(x).to(ir.DataType.INT32 if x.dtype is ir.DataType.UINT16 else ir.DataType.INT64)


def shifted_right(t, x, count):
    """With zeros from the left.

    Args:
        t: the writer.
        x: of an unsigned dtype.
        count: a number, or a tensor of the same dtype.
    """
    bits = x.dtype.bitwidth
    if isinstance(count, int):
        if count == 0:
            return x
        if not 0 < count < bits:
            return t.zeros_like(x)
        return t.bitwise_and(t.bitwise_right_shift(x, count), 2 ** (bits - count) - 1)
    # The first step brings a zero, which the others copy; PyTorch takes what is too far for 31.
    first = t.bitwise_and(t.bitwise_right_shift(x, 1), 2 ** (bits - 1) - 1)
    return t.where(t.eq(count, 0), x, t.bitwise_right_shift(first, t.sub(count, 1)))


def divided(t, a, b):
    """The quotient, downwards, and the remainder."""
    if a.dtype is not ir.DataType.UINT64:
        dtype, a, b = a.dtype, widened(a), widened(b)
        return t.div(a, b, rounding_mode="trunc").to(dtype), t.fmod(a, b).to(dtype)
    # Half of a number, divided and doubled, is right or one too small. In a divisor from 2^63 up
    # no number is contained twice.
    half = t.div(shifted_right(t, a, 1), b, rounding_mode="trunc")
    most = t.bitwise_left_shift(half, 1)
    rest = t.sub(a, t.mul(most, b))
    rest.dtype = a.dtype
    above = turned(t, b)
    more = t.add(most, t.ge(turned(t, rest), above))
    quotient = t.where(t.ge(b, 0), more, t.ge(ordered(t, a), above))
    return quotient, t.sub(a, t.mul(quotient, b))

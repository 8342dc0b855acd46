"""``ortrain::Random…``: random numbers from the step's seed, the same bits on every runtime.

The element at row i and column j (see :mod:`ortrain.ops.hash`) draws 32 bits,

    k = mix(R(i) + C(j))        modulo 2^32

with ``R(i) = mix(i * W + a)`` and ``C(j) = mix(j * W + b)``: a whole hash an element, where a mask
makes do with a product. Of k come

- uniform numbers in [0, 1): the first 24 bits of k (11 for float16, 8 for bfloat16, so that 1 is
  never reached), as PyTorch has them;
- normal numbers by the inverse of the distribution function, of the probability (k + 1/2) / 2^32:
  to 6.34 standard deviations on either side, in steps of 3e-10 near zero and of at most 7e-7
  beyond 1.4 deviations;
- exponential numbers, -log of that probability: from 1.2e-10 to 22.9, in relative steps of at most
  2e-6.

Both inverses are rational approximations (fitted here; relative error below 1e-6) in float32
additions, products, quotients and square roots alone, which IEEE 754 rounds in one way: a logarithm
or a cosine would differ in its last bit from one runtime to the next. The tail needs log(p); a
rational function of the sixteenth root of p stands for it, four square roots.

:func:`drawn` returns the same numbers in numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.ops.base import operator
from ortrain.ops.dropout import keep, threshold
from ortrain.ops.hash import U32, WEYL, Sizes, halves_of, keys, mix, salts_of, weyl

HALF = {ir.DataType.FLOAT16: 11, ir.DataType.BFLOAT16: 8}
DIGITS = 24

# Numerators and denominators by ascending power, and between which arguments they were fitted.
# z / q of q², where q = p - 1/2 and z is the normal number of p: q² from 0 to 0.425².
NORMAL_NEAR = (
    (2.50662839, -15.807963, 26.5909691, -8.21876948),
    (1.0, -7.35364787, 16.0053012, -9.34017003),
)
# -z of u = 1 - the sixteenth root of p: p from 2^-33 to 0.075.
NORMAL_FAR = (
    (-1.29240965, 20.7705096, 248.685143, -193.915148, -195.547651, 132.444561),
    (1.0, 23.1427584, 18.0773302, -82.6935184, 41.3684401),
)
# -log(1 - v) / v of v: from 0 to 0.5.
EXPONENTIAL_NEAR = (
    (0.999999967, -0.936244575, 0.0951841603, 0.0116634387),
    (1.0, -1.43624817, 0.480038535),
)
# -log(p) / u of the same u: p from 2^-33 to 0.5.
EXPONENTIAL_FAR = (
    (16.0000105, -24.3090925, 9.32769146, -0.412731956),
    (1.0, -2.01929906, 1.25912765, -0.231645204),
)
# Steps of 2^-32 away from the middle that NORMAL_NEAR serves.
NEAR = int(0.425 * 2**32)

Rational = tuple[Sequence[float], Sequence[float]]


def _of_shape(dtype: ir.DataType | None = None) -> Any:
    """Typing: the shape in the first input, and a dtype, by default that of the attribute."""

    def types(node: ir.Node) -> None:
        shape = node.inputs[0]
        assert shape is not None
        given = node.attributes.get("dtype")
        wanted = dtype or ir.DataType(given.as_int() if given is not None else ir.DataType.FLOAT)
        known, length = shapes.constant(shape), shapes.dims(shape)
        sizes: Sequence[int | None] | None = None
        if known is not None:
            sizes = known.tolist()
        elif length is not None and isinstance(length[0], int):
            sizes = [None] * length[0]
        shapes.assign(node.outputs[0], wanted, None if sizes is None else ir.Shape(sizes))

    return types


@operator("RandomBits", types=_of_shape(ir.DataType.INT64))
def random_bits(op: Builder, shape: ir.Value, seed: ir.Value, *, stream: int) -> ir.Value:
    """Whole numbers, each from 0 to 2^32 - 1 with equal chance.

    Along the last axis none is there twice, so that a vector of them sorts in one way.

    Args:
        op: the builder.
        shape: int64 vector.
        seed: int64 scalar; one a step.
        stream: number of this draw in its program, so that no two are alike.
    """
    return op.cast(_bits(op, shape, seed, stream), ir.DataType.INT64)


@operator("RandomUniform", types=_of_shape())
def random_uniform(
    op: Builder, shape: ir.Value, seed: ir.Value, *, stream: int, dtype: int = ir.DataType.FLOAT
) -> ir.Value:
    """Numbers in [0, 1), uniformly distributed.

    Args:
        op: the builder.
        shape: int64 vector.
        seed: int64 scalar; one a step.
        stream: as in RandomBits.
        dtype: of the numbers. What float64 gets are those of float32.
    """
    digits = HALF.get(ir.DataType(dtype), DIGITS)
    first = _shifted(op, _bits(op, shape, seed, stream), 32 - digits)
    scaled = op.Mul(op.cast(first, ir.DataType.FLOAT), 2.0**-digits)
    return op.cast(scaled, ir.DataType(dtype))


@operator("RandomNormal", types=_of_shape())
def random_normal(
    op: Builder, shape: ir.Value, seed: ir.Value, *, stream: int, dtype: int = ir.DataType.FLOAT
) -> ir.Value:
    """Numbers of the normal distribution with mean 0 and variance 1.

    Args:
        op: the builder.
        shape: int64 vector.
        seed: int64 scalar; one a step.
        stream: as in RandomBits.
        dtype: of the numbers; they are computed in float32.
    """
    k = _bits(op, shape, seed, stream)
    # Bit 31 is the sign; the others count steps of 2^-32 away from the middle.
    steps = op.BitwiseAnd(k, U32(0x7FFFFFFF))
    q = _middle_of_step(op, steps)
    near = op.Mul(q, _quotient(op, op.Mul(q, q), NORMAL_NEAR))
    p = _middle_of_step(op, op.Sub(U32(0x7FFFFFFF), steps))
    far = _quotient(op, _root(op, p), NORMAL_FAR)
    size = op.Where(op.Less(steps, U32(NEAR)), near, far)
    signed = op.Where(op.Less(k, U32(0x80000000)), size, op.Neg(size))
    return op.cast(signed, ir.DataType(dtype))


@operator("RandomExponential", types=_of_shape())
def random_exponential(
    op: Builder, shape: ir.Value, seed: ir.Value, *, stream: int, dtype: int = ir.DataType.FLOAT
) -> ir.Value:
    """Numbers of the exponential distribution with rate 1, all above 0.

    Args:
        op: the builder.
        shape: int64 vector.
        seed: int64 scalar; one a step.
        stream: as in RandomBits.
        dtype: of the numbers; they are computed in float32.
    """
    k = _bits(op, shape, seed, stream)
    v = _middle_of_step(op, op.BitwiseNot(k))
    near = op.Mul(v, _quotient(op, v, EXPONENTIAL_NEAR))
    u = _root(op, _middle_of_step(op, k))
    far = op.Mul(u, _quotient(op, u, EXPONENTIAL_FAR))
    return op.cast(op.Where(op.Less(k, U32(0x80000000)), far, near), ir.DataType(dtype))


@operator("RandomBernoulli", types=_of_shape(ir.DataType.BOOL))
def random_bernoulli(
    op: Builder, shape: ir.Value, seed: ir.Value, *, chance: float, stream: int
) -> ir.Value:
    """True with one chance everywhere: the mask of a Dropout of ratio ``1 - chance``.

    Args:
        op: the builder.
        shape: int64 vector.
        seed: int64 scalar; one a step.
        chance: in [0, 1].
        stream: as in RandomBits.
    """
    if not 0 < chance < 1:
        everywhere: ir.Value = op.Expand(op.constant(chance >= 1), shape)
        return everywhere
    return keep(op, Sizes.given(shape), seed, chance=chance, stream=stream)


def _bits(op: Builder, shape: ir.Value, seed: ir.Value, stream: int) -> ir.Value:
    """32 bits an element, as uint32."""
    sizes = Sizes.given(shape)
    row_key, column_key = keys(op, seed, stream)
    if sizes.rank < 2:
        first = op.constant(U32(0))
        row = mix(op, weyl(op, first, row_key))
        columns = first if sizes.rank == 0 else sizes.columns(op)
    else:
        row = op.Unsqueeze(mix(op, weyl(op, sizes.rows(op), row_key)), [-1])
        columns = sizes.columns(op)
    return mix(op, op.Add(row, mix(op, weyl(op, columns, column_key))))


def _shifted(op: Builder, k: ir.Value, bits: int) -> ir.Value:
    result: ir.Value = op.BitShift(k, U32(bits), direction="RIGHT")
    return result


def _middle_of_step(op: Builder, count: ir.Value) -> ir.Value:
    """``(count + 1/2) / 2^32`` in float32."""
    result: ir.Value = op.Mul(op.Add(op.cast(count, ir.DataType.FLOAT), 0.5), 2.0**-32)
    return result


def _root(op: Builder, p: ir.Value) -> ir.Value:
    """One minus the sixteenth root of ``p``."""
    for _ in range(4):
        p = op.Sqrt(p)
    result: ir.Value = op.Sub(1.0, p)
    return result


def _quotient(op: Builder, x: ir.Value, rational: Rational) -> ir.Value:
    above, below = (_polynomial(op, x, coefficients) for coefficients in rational)
    result: ir.Value = op.Div(above, below)
    return result


def _polynomial(op: Builder, x: ir.Value, coefficients: Sequence[float]) -> ir.Value:
    *rest, highest = coefficients
    result: ir.Value = op.Add(op.Mul(x, highest), rest[-1])
    for coefficient in reversed(rest[:-1]):
        result = op.Add(op.Mul(result, x), coefficient)
    return result


# -- the same in numpy ---------------------------------------------------------------------------

KINDS = ("bits", "uniform", "normal", "exponential", "bernoulli")


def drawn(
    kind: str,
    shape: Sequence[int],
    *,
    seed: int,
    stream: int,
    chance: float = 1.0,
    digits: int = DIGITS,
) -> np.ndarray:
    """What a program draws, computed in numpy: equal bit for bit.

    Args:
        kind: ``"bits"``, ``"uniform"``, ``"normal"``, ``"exponential"``, or ``"bernoulli"``, which
            is also the mask of the elements that a dropout keeps.
        shape: of the tensor.
        seed: the step's, 64 bits.
        stream: number of the draw in its program.
        chance: of true, for ``"bernoulli"``; of a dropout ``1 - ratio``.
        digits: of ``"uniform"`` numbers: 24, for float16 11 and for bfloat16 8.

    Returns:
        int64 for ``"bits"``, bool for ``"bernoulli"``, else float32, of which other dtypes are
        casts.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: expected one of {', '.join(KINDS)}")
    with np.errstate(over="ignore"):
        rows, columns = _places(shape, seed, stream)
        if kind == "bernoulli":
            return _kept(rows, columns, len(shape), chance).reshape(shape)
        k = mixed(rows + columns).reshape(shape)
    if kind == "bits":
        return k.astype(np.int64)
    if kind == "uniform":
        return (k >> U32(32 - digits)).astype(np.float32) * np.float32(2.0**-digits)
    return _normal(k) if kind == "normal" else _exponential(k)


def _places(shape: Sequence[int], seed: int, stream: int) -> tuple[np.ndarray, np.ndarray]:
    """The mixed numbers of rows, as a column, and of columns."""
    keys = zip(halves_of(seed), salts_of(stream), strict=True)
    row_key, column_key = (_wrapped(half + salt) for half, salt in keys)
    row_count, column_count = int(np.prod(shape[:-1])), shape[-1] if len(shape) else 1
    rows, columns = (
        mixed(np.arange(n, dtype=U32) * U32(WEYL) + key)
        for n, key in ((row_count, row_key), (column_count, column_key))
    )
    return rows[:, None], columns


def _kept(rows: np.ndarray, columns: np.ndarray, rank: int, chance: float) -> np.ndarray:
    if not 0 < chance < 1:
        return np.full((len(rows), len(columns)), chance >= 1)
    rows, columns = rows | U32(1), columns | U32(1)
    product = rows * columns if rank > 1 else columns if rank else rows
    kept: np.ndarray = product < U32(threshold(chance))
    return kept


def _normal(k: np.ndarray) -> np.ndarray:
    steps = k & U32(0x7FFFFFFF)
    q = _middle(steps)
    near = q * _ratio(q * q, NORMAL_NEAR)
    far = _ratio(_rooted(_middle(U32(0x7FFFFFFF) - steps)), NORMAL_FAR)
    size = np.where(steps < U32(NEAR), near, far)
    return np.where(k < U32(0x80000000), size, -size)


def _exponential(k: np.ndarray) -> np.ndarray:
    v, u = _middle(~k), _rooted(_middle(k))
    near, far = v * _ratio(v, EXPONENTIAL_NEAR), u * _ratio(u, EXPONENTIAL_FAR)
    return np.where(k < U32(0x80000000), far, near)


def _middle(count: np.ndarray) -> np.ndarray:
    half, step = np.float32(0.5), np.float32(2.0**-32)
    middle: np.ndarray = (count.astype(np.float32) + half) * step
    return middle


def _rooted(p: np.ndarray) -> np.ndarray:
    for _ in range(4):
        p = np.sqrt(p)
    rooted: np.ndarray = np.float32(1.0) - p
    return rooted


def _ratio(x: np.ndarray, rational: Rational) -> np.ndarray:
    values = []
    for *rest, highest in rational:
        value = x * np.float32(highest)
        for coefficient in reversed(rest[1:]):
            value = (value + np.float32(coefficient)) * x
        values.append(value + np.float32(rest[0]))
    above, below = values
    quotient: np.ndarray = above / below
    return quotient


def _wrapped(number: int) -> np.ndarray:
    return np.array([number & 0xFFFFFFFF], U32)


def mixed(h: np.ndarray) -> np.ndarray:
    """``mix`` of :mod:`ortrain.ops.hash`, of uint32."""
    h = (h ^ (h >> U32(16))) * U32(0x7FEB352D)
    h = (h ^ (h >> U32(15))) * U32(0x846CA68B)
    return h ^ (h >> U32(16))

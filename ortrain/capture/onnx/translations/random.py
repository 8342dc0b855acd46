"""Random draws, from the step's seed. Each has the number of its stream as ``stream``.

``ortrain/capture/onnx/replay.py`` does the same to tensors: a change here has its twin there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortrain.capture.onnx.translations.base import (
    Scalar,
    Size,
    Translator,
    aten,
    dtype_or,
    refuse,
    symbolic,
    translation,
)
from ortrain.graph import shapes

# The mean and the variance that alpha dropout keeps are those of SELU.
ALPHA = 1.7580993408473766
WHOLE = 2**31
"""The largest range of whole numbers whose product with 32 bits fits into an int64."""


def _real(op: Translator, kind: str, shape: ir.Value, stream: int, dtype: ir.DataType) -> ir.Value:
    return op.ours(f"Random{kind}", shape, op.seed(), stream=stream, dtype=int(dtype))


def _floating(dtype: Any, default: ir.DataType = ir.DataType.FLOAT) -> ir.DataType:
    wanted = dtype_or(dtype, default)
    if not wanted.is_floating_point():
        raise refuse("random complex numbers", "ONNX has no complex arithmetic", "draw two tensors")
    return wanted


def _cut(op: Translator, drawn: ir.Value, *sources: Any) -> ir.Value:
    """What is drawn, with a gradient of zero to the tensors that autograd connects it with."""
    for source in sources:
        if isinstance(source, ir.Value) and not _new(source) and source.dtype == drawn.dtype:
            drawn = op.Where(op.constant(np.array(False)), source, drawn)
    return drawn


def _new(value: ir.Value) -> bool:
    """Whether a tensor was made empty, full of one number or random."""
    node = value.producer()
    return node is not None and (
        node.op_type in ("Expand", "Constant", "ConstantOfShape")
        or node.op_type.startswith("Random")
    )


# -- real numbers --------------------------------------------------------------------------------


@translation(aten.rand.default)
def rand(
    op: Translator, size: Sequence[Size], *, stream: int, dtype: Any = None, **kw: Any
) -> ir.Value:
    return _real(op, "Uniform", op.sizes(size), stream, _floating(dtype))


@translation(aten.randn.default)
def randn(
    op: Translator, size: Sequence[Size], *, stream: int, dtype: Any = None, **kw: Any
) -> ir.Value:
    return _real(op, "Normal", op.sizes(size), stream, _floating(dtype))


@translation(aten.rand_like.default)
def rand_like(
    op: Translator, self: ir.Value, *, stream: int, dtype: Any = None, **kw: Any
) -> ir.Value:
    assert self.dtype is not None
    return _real(op, "Uniform", op.shape(self), stream, _floating(dtype, self.dtype))


@translation(aten.randn_like.default)
def randn_like(
    op: Translator, self: ir.Value, *, stream: int, dtype: Any = None, **kw: Any
) -> ir.Value:
    assert self.dtype is not None
    return _real(op, "Normal", op.shape(self), stream, _floating(dtype, self.dtype))


def _in_place_of(op: Translator, kind: str, self: ir.Value, stream: int) -> ir.Value:
    assert self.dtype is not None
    return _real(op, kind, op.shape(self), stream, _floating(self.dtype))


@translation(aten.uniform.default)
def uniform(
    op: Translator,
    self: ir.Value,
    from_: float = 0.0,
    to: float = 1.0,
    *,
    stream: int,
    **kw: Any,
) -> ir.Value:
    drawn = _in_place_of(op, "Uniform", self, stream)
    return _cut(op, _moved(op, drawn, kw.get("from", from_), to - kw.get("from", from_)), self)


@translation(aten.normal_functional.default)
def normal(
    op: Translator,
    self: ir.Value,
    mean: float = 0.0,
    std: float = 1.0,
    *,
    stream: int,
    **kw: Any,
) -> ir.Value:
    return _cut(op, _moved(op, _in_place_of(op, "Normal", self, stream), mean, std), self)


@translation(aten.log_normal.default)
def log_normal(
    op: Translator,
    self: ir.Value,
    mean: float = 1.0,
    std: float = 2.0,
    *,
    stream: int,
    **kw: Any,
) -> ir.Value:
    drawn = _moved(op, _in_place_of(op, "Normal", self, stream), mean, std)
    return _cut(op, op.Exp(drawn), self)


def _moved(op: Translator, drawn: ir.Value, offset: float, scale: float) -> ir.Value:
    drawn = drawn if scale == 1 else op.Mul(drawn, float(scale))
    return drawn if offset == 0 else op.Add(drawn, float(offset))


@translation(aten.exponential.default)
def exponential(
    op: Translator, self: ir.Value, lambd: float = 1.0, *, stream: int, **kw: Any
) -> ir.Value:
    drawn = _in_place_of(op, "Exponential", self, stream)
    return _cut(op, drawn if lambd == 1 else op.Div(drawn, float(lambd)), self)


@translation(aten.normal.float_float)
def normal_of_numbers(
    op: Translator,
    mean: float,
    std: float,
    size: Sequence[Size],
    *,
    stream: int,
    dtype: Any = None,
    **kw: Any,
) -> ir.Value:
    drawn = _real(op, "Normal", op.sizes(size), stream, _floating(dtype))
    return _moved(op, drawn, mean, std)


@translation(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
def normal_of_tensors(
    op: Translator, mean: Scalar, std: Scalar = 1.0, *, stream: int, **kw: Any
) -> ir.Value:
    """PyTorch lets no gradient through to either: it is zero."""
    like = mean if isinstance(mean, ir.Value) else std
    assert isinstance(like, ir.Value)
    assert like.dtype is not None
    shape = op.shape(like)
    if isinstance(mean, ir.Value) and isinstance(std, ir.Value):
        if shapes.dims(mean) != shapes.dims(std):
            shape = op.Shape(op.Add(mean, std))
        std = op.cast(std, like.dtype)
    drawn = _real(op, "Normal", shape, stream, _floating(like.dtype))
    if not isinstance(std, float) or std != 1:
        drawn = op.Mul(drawn, _stopped(op, std))
    if not isinstance(mean, float) or mean != 0:
        drawn = op.Add(drawn, _stopped(op, mean))
    same = [v for v in (mean, std) if isinstance(v, ir.Value)]
    return _cut(op, drawn, *same)


def _stopped(op: Translator, value: Scalar) -> Scalar:
    return op.ours("StopGradient", value) if isinstance(value, ir.Value) else float(value)


@translation(aten.rrelu.default)
def rrelu(
    op: Translator,
    self: ir.Value,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    *,
    stream: int = 0,
    **kw: Any,
) -> ir.Value:
    if not training:
        return op.LeakyRelu(self, alpha=(lower + upper) / 2)
    slope = _moved(op, _in_place_of(op, "Uniform", self, stream), lower, upper - lower)
    return op.Mul(self, op.Where(op.LessOrEqual(self, 0.0), slope, 1.0))


# -- masks ---------------------------------------------------------------------------------------


def _mask(op: Translator, shape: ir.Value, chance: float, stream: int) -> ir.Value:
    return op.ours("RandomBernoulli", shape, op.seed(), chance=float(chance), stream=stream)


@translation(aten.bernoulli.p)
def bernoulli_p(
    op: Translator, self: ir.Value, p: float = 0.5, *, stream: int, **kw: Any
) -> ir.Value:
    assert self.dtype is not None
    return _cut(op, op.cast(_mask(op, op.shape(self), p, stream), self.dtype), self)


@translation(aten.bernoulli.default)
def bernoulli(op: Translator, self: ir.Value, *, stream: int, **kw: Any) -> ir.Value:
    assert self.dtype is not None
    return _cut(op, op.cast(_below(op, op.shape(self), self, stream), self.dtype), self)


@translation(aten.bernoulli.Tensor)
def bernoulli_of_tensor(
    op: Translator, self: ir.Value, p: ir.Value, *, stream: int, **kw: Any
) -> ir.Value:
    assert self.dtype is not None
    return _cut(op, op.cast(_below(op, op.shape(self), p, stream), self.dtype), self)


def _below(op: Translator, shape: ir.Value, chance: ir.Value, stream: int) -> ir.Value:
    """True with the chances in a tensor: 32 bits are compared, in float64, which holds them all."""
    bits = op.ours("RandomBits", shape, op.seed(), stream=stream)
    double = ir.DataType.DOUBLE
    return op.Less(op.cast(bits, double), op.Mul(op.cast(chance, double), 2.0**32))


@translation(aten.dropout.default)
def dropout(op: Translator, input: ir.Value, p: float, train: bool, *, stream: int = 0) -> ir.Value:
    if not train or p == 0:
        return input
    return op.ours("Dropout", input, op.seed(), ratio=float(p), stream=stream)


@translation(aten.feature_dropout.default)
def feature_dropout(
    op: Translator, input: ir.Value, p: float, train: bool, *, stream: int = 0
) -> ir.Value:
    """Drops whole channels: the mask is that of one element a channel, spread by a product."""
    if not train or p == 0:
        return input
    assert input.dtype is not None
    length = shapes.rank(input)
    assert length is not None
    one = op.constant(np.ones((1,) * length), input.dtype)
    spread = op.Expand(one, _channels(op, input))
    return op.Mul(input, op.ours("Dropout", spread, op.seed(), ratio=float(p), stream=stream))


def _channels(op: Translator, input: ir.Value) -> ir.Value:
    """The shape of a mask with one element a channel."""
    length = shapes.rank(input)
    assert length is not None
    return op.Concat(op.dim(input, 0), op.dim(input, 1), [1] * (length - 2), axis=0)


@translation(aten.alpha_dropout.default)
def alpha_dropout(
    op: Translator, input: ir.Value, p: float, train: bool, *, stream: int = 0
) -> ir.Value:
    return _alpha_dropout(op, input, op.shape(input), p, train, stream)


@translation(aten.feature_alpha_dropout.default)
def feature_alpha_dropout(
    op: Translator, input: ir.Value, p: float, train: bool, *, stream: int = 0
) -> ir.Value:
    return _alpha_dropout(op, input, _channels(op, input), p, train, stream)


def _alpha_dropout(
    op: Translator, input: ir.Value, shape: ir.Value, p: float, train: bool, stream: int
) -> ir.Value:
    """``x * kept * a + (kept - 1) * alpha * a + alpha * a * p``: it keeps mean and variance."""
    if not train or p == 0:
        return input
    if p == 1:
        return op.Mul(input, 0.0)
    assert input.dtype is not None
    a = 1 / math.sqrt((ALPHA * ALPHA * p + 1) * (1 - p))
    kept = op.cast(_mask(op, shape, 1 - p, stream), input.dtype)
    offset = op.Add(op.Mul(op.Sub(kept, 1.0), ALPHA * a), ALPHA * a * p)
    return op.Add(op.Mul(input, op.Mul(kept, a)), offset)


@translation(aten.native_dropout.default)
def native_dropout(
    op: Translator, input: ir.Value, p: float, train: bool | None, *, stream: int = 0
) -> tuple[ir.Value, ir.Value]:
    if train is False:
        return input, op.Expand(op.constant(np.array(True)), op.shape(input))
    assert input.dtype is not None
    mask = _mask(op, op.shape(input), 1 - p, stream)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return op.Mul(op.Mul(input, op.cast(mask, input.dtype)), scale), mask


# -- whole numbers -------------------------------------------------------------------------------


def _whole(
    op: Translator, low: Size, high: Size, shape: ir.Value, stream: int, dtype: ir.DataType
) -> ir.Value:
    """Each of ``low … high - 1`` with equal chance, but for 2^-32: ``low + k * range / 2^32``."""
    if isinstance(low, int) and isinstance(high, int) and high - low > WHOLE:
        raise refuse(f"a draw of whole numbers from {low} to {high}", "32 bits are drawn for each")
    bits = op.ours("RandomBits", shape, op.seed(), stream=stream)
    span = high - low if isinstance(low, int) and isinstance(high, int) else op.Sub(high, low)
    numbers = op.Div(op.Mul(bits, span), np.int64(2**32))
    return op.cast(numbers if isinstance(low, int) and not low else op.Add(numbers, low), dtype)


@translation(aten.randint.default)
def randint(
    op: Translator, high: Size, size: Sequence[Size], *, stream: int, dtype: Any = None, **kw: Any
) -> ir.Value:
    return _whole(op, 0, high, op.sizes(size), stream, dtype_or(dtype, ir.DataType.INT64))


@translation(aten.randint.low)
def randint_low(
    op: Translator,
    low: Size,
    high: Size,
    size: Sequence[Size],
    *,
    stream: int,
    dtype: Any = None,
    **kw: Any,
) -> ir.Value:
    return _whole(op, low, high, op.sizes(size), stream, dtype_or(dtype, ir.DataType.INT64))


@translation(aten.randint_like.default)
def randint_like(
    op: Translator, self: ir.Value, high: Size, *, stream: int, dtype: Any = None, **kw: Any
) -> ir.Value:
    return randint_like_low(op, self, 0, high, stream=stream, dtype=dtype)


@translation(aten.randint_like.low_dtype)
def randint_like_low(
    op: Translator,
    self: ir.Value,
    low: Size,
    high: Size,
    *,
    stream: int,
    dtype: Any = None,
    **kw: Any,
) -> ir.Value:
    assert self.dtype is not None
    return _whole(op, low, high, op.shape(self), stream, dtype_or(dtype, self.dtype))


@translation(aten.random.to)
def random_to(op: Translator, self: ir.Value, to: int, *, stream: int, **kw: Any) -> ir.Value:
    return random_from(op, self, 0, to, stream=stream)


@translation(getattr(aten.random, "from"))
def random_from(
    op: Translator, self: ir.Value, low: int, to: int | None, *, stream: int, **kw: Any
) -> ir.Value:
    assert self.dtype is not None
    if to is None:
        raise refuse("a draw of whole numbers without an upper bound", "32 bits are drawn for each")
    return _cut(op, _whole(op, low, to, op.shape(self), stream, self.dtype), self)


@translation(aten.randperm.default)
def randperm(op: Translator, n: Size, *, stream: int, dtype: Any = None, **kw: Any) -> ir.Value:
    """The order of as many different random numbers."""
    count = op.index(n)
    bits = op.ours("RandomBits", count, op.seed(), stream=stream)
    _, order = op.TopK(bits, count, outputs=2)
    return op.cast(order, dtype_or(dtype, ir.DataType.INT64))


@translation(aten.multinomial.default)
def multinomial(
    op: Translator,
    self: ir.Value,
    num_samples: int,
    replacement: bool = False,
    *,
    stream: int,
    **kw: Any,
) -> ir.Value:
    """Of exponential numbers E, the index of the largest p / E is drawn with chance p.

    The largest few are draws without replacement. With replacement the cumulative sum of p is
    compared with uniform numbers.
    """
    if not isinstance(num_samples, int):
        raise symbolic("multinomial")
    assert self.dtype is not None
    chances = op.ours("StopGradient", self)
    if num_samples == 1 or not replacement:
        noise = _real(op, "Exponential", op.shape(self), stream, self.dtype)
        rated = op.Div(chances, noise)
        if num_samples == 1:
            return op.ArgMax(rated, axis=-1, keepdims=1)
        return op.TopK(rated, [num_samples], axis=-1, outputs=2)[1]
    sums = op.CumSum(chances, np.int64(-1))
    lead = op.Shape(self, start=0, end=-1)
    noise = _real(op, "Uniform", op.Concat(lead, [num_samples], axis=0), stream, self.dtype)
    total = op.Slice(sums, [-1], [2**63 - 1], [-1])
    passed = op.GreaterOrEqual(op.Unsqueeze(op.Mul(noise, total), [-1]), op.Unsqueeze(sums, [-2]))
    return op.ReduceSum(op.cast(passed, ir.DataType.INT64), [-1], keepdims=0)


@translation(aten.cauchy.default)
def cauchy(
    op: Translator,
    self: ir.Value,
    median: float = 0.0,
    sigma: float = 1.0,
    *,
    stream: int,
    **kw: Any,
) -> ir.Value:
    drawn = _in_place_of(op, "Uniform", self, stream)
    angle = op.Mul(op.Sub(drawn, 0.5), math.pi)
    return _cut(op, _moved(op, op.Tan(angle), median, sigma), self)


@translation(aten.geometric.default)
def geometric(op: Translator, self: ir.Value, p: float, *, stream: int, **kw: Any) -> ir.Value:
    """The number of tries: an exponential number in units of ``-log(1 - p)``, rounded up."""
    drawn = _in_place_of(op, "Exponential", self, stream)
    return _cut(op, op.Ceil(op.Div(drawn, -math.log1p(-p))), self)

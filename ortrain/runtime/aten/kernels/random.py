"""Random numbers from the step's seed, the same bits as on any other executor."""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.ops.dropout import threshold
from ortrain.ops.random import DIGITS, HALF
from ortrain.runtime.aten.lines import Raw
from ortrain.runtime.aten.table import kernel

_DEVICE = Raw("device")


@kernel("ortrain::Dropout")
def dropout(t, input, seed, index=None, *, ratio, stream):
    if ratio <= 0:
        return input
    if ratio >= 1:
        return t.mul(input, 0.0)
    chance = 1.0 - ratio
    given = () if index is None else (t.tensor(index),)
    result = t.call(
        "hash.dropout", input, t.seed(seed, stream), stream, threshold(chance), 1.0 / chance, *given
    )
    result.dims, result.dtype = input.dims, input.dtype
    return result


def _keeps_all(node):
    """Whether a standard one is not in training: those that draw, draw as they like."""
    training = node.inputs[2] if len(node.inputs) > 2 else None
    known = shapes.constant(training)
    return training is None or (known is not None and not known.item())


@kernel("Dropout", when=_keeps_all)
def standard_dropout(t, data, ratio=None, training_mode=None, *, seed=None):
    return data, t.ones_like(data, dtype=ir.DataType.BOOL)


@kernel("ortrain::RandomBits")
def random_bits(t, shape, seed, *, stream):
    return t.call("draws.bits", t.ints(shape), t.seed(seed, stream), stream, _DEVICE)


@kernel("ortrain::RandomUniform")
def random_uniform(t, shape, seed, *, stream, dtype=ir.DataType.FLOAT):
    digits = HALF.get(ir.DataType(dtype), DIGITS)
    drawn = t.call("draws.uniform", t.ints(shape), t.seed(seed, stream), stream, digits, _DEVICE)
    return _of_dtype(drawn, dtype)


def _distribution(operator, function):
    @kernel(operator)
    def draw(t, shape, seed, *, stream, dtype=ir.DataType.FLOAT):
        drawn = t.call(f"draws.{function}", t.ints(shape), t.seed(seed, stream), stream, _DEVICE)
        return _of_dtype(drawn, dtype)


_distribution("ortrain::RandomNormal", "normal")
_distribution("ortrain::RandomExponential", "exponential")


@kernel("ortrain::RandomBernoulli")
def random_bernoulli(t, shape, seed, *, chance, stream):
    sizes = t.ints(shape)
    if not 0 < chance < 1:
        return t.full(sizes, chance >= 1, dtype=ir.DataType.BOOL, device=_DEVICE)
    return t.call("hash.keep", sizes, t.seed(seed, stream), stream, threshold(chance), _DEVICE)


def _of_dtype(drawn, dtype):
    """What is drawn in float32 in another dtype."""
    return drawn if dtype == ir.DataType.FLOAT else drawn.to(ir.DataType(dtype))
